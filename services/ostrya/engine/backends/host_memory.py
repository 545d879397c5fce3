"""How much memory this process can still take, as Linux tells it. Called by the CPU backend.

What is cached of files counts as available: the kernel gives it up when it is needed. The estimate is meant to be high
rather than low, because a model that is refused here is not tried.
"""

from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """The least of what the machine and each cgroup around this process have left; None where nobody says."""
    found = [left for left in (_of_machine(root), *_of_cgroups(root)) if left is not None]
    return max(0, min(found)) if found else None


def _of_machine(root: Path) -> int | None:
    kib = _table(root / "proc/meminfo").get("MemAvailable:")
    return None if kib is None else kib * 1024


def _of_cgroups(root: Path) -> Iterator[int | None]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _left(root / "sys/fs/cgroup/memory", path, *names)


def _left(mount: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int | None]:
    """Of a group and those around it. In a container its own is the mount itself, whatever its path says."""
    group = mount / path.strip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(mount):
            return
        most, used = _number(directory / limit), _number(directory / usage)
        if most is not None and used is not None:
            cached = _table(directory / "memory.stat")
            files = sum(cached.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield most - max(0, used - files)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


def _text(path: Path) -> str:
    """Empty if it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""
