"""How many files and connections this process may have open, and how many of them its clients."""

import contextlib
import resource

_CLIENTS_RATIO = 0.75
"""The rest is for what the process itself opens: ways to workers, Redis, scrapes, files."""
_MIN_CLIENTS = 64


def raise_limit() -> None:
    """Lifts the soft limit to the hard one, which is what soft limits are for; call once, at the start of a process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS calls its limit infinite and refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_clients() -> int:
    """Connections that clients may hold, so that none of them takes the last descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return (1 << 31) - 1
    return max(_MIN_CLIENTS, int(_CLIENTS_RATIO * soft))
