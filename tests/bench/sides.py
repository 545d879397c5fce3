"""What is compared: each side is a process of its own, which waits on a pipe while another is measured.

A side that cannot start, dies or hangs raises NotRun with the reason. The other end is tests.bench.answering.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ANSWER_LIMIT_S = 300.0
"""The slowest start takes a minute; more means that it hangs."""
EXIT_LIMIT_S = 20.0


class NotRun(Exception):
    """A side has no figures; says why."""


class Side:
    """One running side. End it with close()."""

    def __init__(self, name: str, python: str, module: str, *arguments: str, directory: Path) -> None:
        """Starts it and waits until it is ready; its log is kept in `directory`. Raises NotRun."""
        self.name = name
        self._log = directory / f"{name.replace(' ', '-')}.log"
        read, write = os.pipe()
        self._answers = os.fdopen(read)
        started = time.perf_counter()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [python, "-m", module, str(write), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    pass_fds=(write,),
                    # A side may have children; it ends with them.
                    start_new_session=True,
                )
        except OSError as error:
            self._answers.close()
            raise NotRun(f"{python}: {error.strerror}; `make bench-peers` installs it") from error
        finally:
            os.close(write)
        self._answer()
        self.start_s = time.perf_counter() - started
        """From the start of its process until it can generate."""

    def generate_s(self, prompts: Sequence[Sequence[int]], num_new: int) -> float:
        """How long it takes to continue all prompts at once by `num_new` tokens each. Raises NotRun."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the missing answer says so
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_new": num_new}) + "\n")
            self._process.stdin.flush()
        return self._answer()["seconds"]

    def close(self) -> None:
        """Ends it and all that it started; once more does nothing."""
        if self._answers.closed:
            return
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_LIMIT_S)
        self._kill()
        self._process.wait()
        self._answers.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self) -> dict[str, float]:
        hung = threading.Event()

        def end() -> None:
            hung.set()
            self._kill()

        timer = threading.Timer(ANSWER_LIMIT_S, end)
        timer.start()
        try:
            line = self._answers.readline()
        finally:
            timer.cancel()
            timer.join()
        if not line:
            self.close()
            raise NotRun(f"no answer in {ANSWER_LIMIT_S:.0f} s" if hung.is_set() else self._last_words())
        answer: dict[str, float] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), f"ended with code {code}")
