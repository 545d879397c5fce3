"""Children of `ostrya up`: in a session of their own, tethered to their parent, logged to a file, always stopped."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TETHER = Path(__file__).with_name("tether.py")
MARK = "OSTRYA_STACK"
"""Environment variable that every process of a stack carries, down to the grandchildren."""
TAIL_BYTES = 16 << 10


class Child:
    """One running process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.log = name, log
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> "Child":
        """Starts it; stdout and stderr are appended to `log`. OSError if it cannot be started."""
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(TETHER), str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                # Ctrl-C reaches `up` alone, which then stops its children in order.
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def ended(self) -> None:
        """Returns when it has."""
        await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM; after `grace_s` seconds SIGKILL, to it and to what it started."""
        if self.running:
            self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """SIGKILL to its whole process group, which may outlive it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill_alone(self) -> None:
        """SIGKILL to this process only, as the kernel's out-of-memory killer does."""
        self._process.kill()

    def obituary(self, num_lines: int = 8) -> str:
        """How it ended, with its last words."""
        code = self._process.returncode
        if code is None:
            how = "is running"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        lines = "\n".join(f"    {line}" for line in self.last_lines(num_lines))
        return f"{self.name} {how}; its log, {self.log}, ends with\n{lines or '    (nothing)'}"

    def last_lines(self, count: int) -> list[str]:
        """Of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-count:]


def marked(value: str, *, variable: str = MARK) -> list[int]:
    """Processes that are alive and carry the mark in their environment; Linux only, elsewhere none are seen.

    Nor is Redis, which writes its title over its environment; it starts nothing, so stopping it is enough.
    """
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
