"""What must be the same on every host of a slice, told before anything is loaded, and what differs, in words. Pure.

Weights are told apart cheaply: by the names and sizes of their files and by a few kB of each.
"""

import hashlib
import hmac
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from ostrya.engine.config import EngineConfig
from ostrya.engine.world import Slice, ranks_per_host
from ostrya.errors import ModelLoadError
from ostrya.gguf_header import part_names

_PACKAGES = ("ostrya", "torch", "torch_xla", "torch_tpu", "libtpu", "jax")
_OF_ONE_HOST = ("model_path", "compile_cache", "num_threads")
"""Settings that each host may have in its own way."""
_SAMPLE_BYTES = 16 << 10
_NUM_SAMPLES = 4
_MAX_SHOWN = 5


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is and has, by name."""

    software: dict[str, str]
    config: dict[str, str]
    weights: dict[str, str]


def identity(config: EngineConfig, factory: str, slice_: Slice) -> Identity:
    """Of this process. ModelLoadError when the weights cannot be read."""
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if name not in _OF_ONE_HOST}
    fields |= {
        "factory": factory,
        "hosts": slice_.num_hosts,
        "ranks_per_host": ranks_per_host(config, slice_.num_hosts),
    }
    return Identity(
        software={"python": f"{sys.version_info.major}.{sys.version_info.minor}", **dict(_installed())},
        config={name: msgspec.json.encode(value).decode() for name, value in fields.items()},
        weights=weights(Path(config.model_path)),
    )


def differences(theirs: Identity, ours: Identity) -> list[str]:
    """Clauses about a host that is not like host 0; none if it is."""
    clauses = [
        f"has {name} {their or 'not at all'}, host 0 {our or 'not at all'}"
        for name, their, our in _different(theirs.software, ours.software)
    ]
    for what, their_values, our_values in (
        ("config", theirs.config, ours.config),
        ("weights", theirs.weights, ours.weights),
    ):
        found = [
            f"{name}: {their or 'none'} / {our or 'none'}" for name, their, our in _different(their_values, our_values)
        ]
        if found:
            more = f", and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
            clauses.append(f"differs from host 0 in {what}, {', '.join(found[:_MAX_SHOWN])}{more}")
    return clauses


def weights(path: Path) -> dict[str, str]:
    """Size and a digest of samples, for each file that makes up a model."""
    if path.is_dir():
        files = [path / "config.json", *path.glob("*.safetensors")]
    else:
        files = [path.with_name(name) for name in part_names(path.name)]
    try:
        return {one.name: _sampled(one) for one in sorted(files) if one.is_file()}
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error


def proof(secret: str, nonce: bytes) -> bytes:
    """Shows that one knows the secret without telling it."""
    return hmac.digest(secret.encode(), b"ostrya slice" + nonce, "sha256")


def is_proof(given: bytes, secret: str, nonce: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, nonce))


def _installed() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _different(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = dict.fromkeys((*ours, *theirs))
    return [
        (name, theirs.get(name, ""), ours.get(name, "")) for name in names if theirs.get(name, "") != ours.get(name, "")
    ]


def _sampled(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for index in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes {digest.hexdigest()[:8]}"
