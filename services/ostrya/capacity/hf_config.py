"""A Hugging Face config.json of a known kind -> a model spec.

The only module of capacity/ that reads a file; the kinds are in hf_kinds.py.
"""

from pathlib import Path

import msgspec

from ostrya.capacity.hf_fields import Fields, shown
from ostrya.capacity.hf_kinds import KINDS, READY_ONLY
from ostrya.capacity.spec import ModelSpec
from ostrya.errors import ConfigError

_MAX_CONFIG_BYTES = 4 * 1024**2
"""The largest released config.json (one quantization entry per module) is below 1 MiB."""


def read_spec(path: Path) -> ModelSpec:
    """ConfigError in one line: unreadable, truncated, of an unknown kind, or which field is missing or wrong."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > _MAX_CONFIG_BYTES:
            raise ConfigError([f"{path} has {num_bytes} bytes; the limit for a config.json is {_MAX_CONFIG_BYTES}"])
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror or error}"]) from error
    return spec_of(_decoded(raw, where=str(path)), name=path.parent.name or path.stem, where=str(path))


def _decoded(raw: bytes, *, where: str) -> dict[str, object]:
    # Field by field, so that a number that does not fit is named by the field it is in.
    field = ""
    config: dict[str, object] = {}
    try:
        for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            field = f"{name[:64]!r}: "
            config[name] = msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = str(error).partition(" - at `")[0]
        raise ConfigError([f"{where} is not a whole JSON object: {field}{problem}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{where}: {field}nested too deeply for a config.json"]) from error
    return config


def spec_of(config: dict[str, object], *, name: str, where: str) -> ModelSpec:
    """Of a decoded config.json; `where` names it in messages."""
    kind = config.get("model_type")
    reader = KINDS.get(kind) if isinstance(kind, str) else None
    if isinstance(kind, str) and kind in READY_ONLY:
        raise ConfigError([f"{where} is of kind {kind!r}, which no file expresses; use --model {READY_ONLY[kind]}"])
    if reader is None:
        found = "has no model_type" if kind is None else f"is of kind {shown(kind)}, which is not known"
        raise ConfigError([f"{where} {found}; known kinds: {', '.join(sorted(KINDS))}"])
    outer = Fields(config, outer=config, where=where)
    # Models with a vision tower keep the language model's fields apart.
    return reader(outer.part("text_config") if outer.has("text_config") else outer, name)
