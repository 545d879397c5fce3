"""Where compiled programs of backend xla are kept between starts: a directory for each set of things that must be the
same, below the one that XLA_PERSISTENT_CACHE_PATH names (the chart sets it). Called by xla.py before the first compile.

torch_xla names a program by its graph alone; a flag or a version that changes what is compiled from it does not change
the name. What cannot be used makes a start slower, never impossible.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT_VARIABLE = "XLA_PERSISTENT_CACHE_PATH"
FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_DISABLE_FUNCTIONALIZATION")
_IDENTITY = "identity.json"
"""Beside the programs, so that a person sees what a directory is of."""


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """Where to keep programs, if anywhere."""

    path: Path | None
    problem: str | None = None
    """Why not, in words; None also where nobody asked for a cache."""


def flags() -> dict[str, str]:
    """What the environment tells the compiler."""
    return {name: os.environ.get(name, "") for name in FLAG_VARIABLES}


def cache_directory(root: str, identity: Mapping[str, str]) -> CacheDirectory:
    """The directory of this identity, made if need be. Empty root: none."""
    if not root:
        return CacheDirectory(None)
    text = json.dumps(dict(identity), sort_keys=True, indent=1)
    path = Path(root) / hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Written elsewhere first: several workers may share the claim.
        with tempfile.NamedTemporaryFile("w", dir=path, delete=False) as file:
            file.write(text)
        os.replace(file.name, path / _IDENTITY)
    except OSError as error:
        problem = f"compile cache {root} cannot be written ({error.strerror}); every start compiles anew"
        return CacheDirectory(None, problem)
    return CacheDirectory(path)
