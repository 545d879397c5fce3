"""How long a process had to wait for a CPU, as Linux counts it for each thread; 0 where the kernel does not say."""

from contextlib import suppress
from pathlib import Path

_NS = 1e9


class Starvation:
    """Of one process and all its threads."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._waited_ns: dict[str, int] = {}

    def waited_s(self) -> float:
        """What its most starved thread has waited since the last call; 0 at the first."""
        before, self._waited_ns = self._waited_ns, self._read()
        longest = max((now - before[name] for name, now in self._waited_ns.items() if name in before), default=0)
        return longest / _NS

    def _read(self) -> dict[str, int]:
        """Nanoseconds runnable without a CPU, by thread. A stopped thread and one that sleeps wait for none."""
        found = {}
        with suppress(OSError):
            for task in self._tasks.iterdir():
                with suppress(OSError, ValueError):  # a thread that has just ended says nothing of the others
                    _, waited_ns, _ = (task / "schedstat").read_text().split()
                    found[task.name] = int(waited_ns)
        return found
