"""Whether torch_xla can be imported here, from what is installed; imports neither it nor torch. With a torch that does
not fit, its import ends in an undefined symbol, and its metadata lets pip install such a pair.
"""

import importlib.metadata

TORCH, TORCH_XLA = "2.9", "2.9.0"
"""The last release of torch_xla, and the torch it loads with."""
_INSTALL = f"pip install 'ostrya[xla]' in a venv of its own (torch=={TORCH}.*, torch_xla=={TORCH_XLA})"


def installation_problem() -> str | None:
    """Why it cannot be, and what to do; None when all is well."""
    torch, torch_xla = _version("torch") or "(none)", _version("torch_xla")
    if torch_xla is None:
        return f"backend xla needs torch_xla, which is not installed; {_INSTALL}"
    if torch_xla.partition("+")[0] != TORCH_XLA or not torch.startswith(f"{TORCH}."):
        return f"torch {torch} and torch_xla {torch_xla} do not fit; {_INSTALL}"
    return None


def versions() -> dict[str, str]:
    """Of all that decides what a program becomes."""
    return {name: _version(name) or "" for name in ("ostrya", "torch", "torch_xla", "libtpu", "jax")}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
