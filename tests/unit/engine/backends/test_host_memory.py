"""What is available, as machines and containers of both cgroup versions tell it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from ostrya.engine.backends.host_memory import available_bytes

MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n"}
V2 = {"proc/self/cgroup": "0::/a/b\n"}
GROUP = "sys/fs/cgroup/a/b"
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n"}
OLD = "sys/fs/cgroup/memory"


def left(root: Path, *trees: Mapping[str, str]) -> int | None:
    for tree in trees:
        for name, text in tree.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return available_bytes(root)


def group(at: str, most: object, used: int, stat: str = "") -> dict[str, str]:
    return {f"{at}/memory.max": f"{most}\n", f"{at}/memory.current": f"{used}\n", f"{at}/memory.stat": stat}


def old_group(at: str, most: int, used: int, stat: str) -> dict[str, str]:
    return {
        f"{at}/memory.limit_in_bytes": f"{most}\n",
        f"{at}/memory.usage_in_bytes": f"{used}\n",
        f"{at}/memory.stat": stat,
    }


CACHED = "anon 1\nactive_file 200\ninactive_file 100\n"
CACHED_V1 = "active_file 7\ntotal_active_file 200\ntotal_inactive_file 100\n"


@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        ([], None),
        ([MACHINE], 8_192_000),
        ([MACHINE, V2], 8_192_000),
        ([MACHINE, V2, group(GROUP, "max", 5)], 8_192_000),
        ([MACHINE, V2, group(GROUP, 1000, 500)], 500),
        # Files in the page cache can go.
        ([MACHINE, V2, group(GROUP, 1000, 500, CACHED)], 800),
        ([MACHINE, V2, group(GROUP, 1000, 900, ""), group("sys/fs/cgroup/a", 5000, 4990)], 10),
        ([V2, group(GROUP, 1000, 2000)], 0),
        # In a container the mount is its own group.
        ([V2, group("sys/fs/cgroup", 1000, 400)], 600),
        ([MACHINE, V1, old_group(f"{OLD}/x", 1000, 500, CACHED_V1)], 800),
        ([MACHINE, V1, old_group(OLD, 700, 500, CACHED_V1)], 500),
        ([MACHINE, V1, old_group(OLD, 9223372036854771712, 500, CACHED_V1)], 8_192_000),
    ],
)
def test_the_least_of_what_is_left_counts(trees: list[Mapping[str, str]], expected: int | None, tmp_path: Path) -> None:
    assert left(tmp_path, *trees) == expected


def test_this_machine_says_something() -> None:
    found = available_bytes()
    assert found is not None
    assert found > 1 << 20
