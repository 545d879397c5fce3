"""`ostrya up` itself, with the real model: it serves, it passes its own scenario, and it leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ostrya.cli.children import marked
from ostrya.client import Client
from tests.fakes.redis_server import free_port

RUN = "OSTRYA_TEST_RUN"
START_S = 300.0
CHECK_S = 600.0
END_S = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")


class Up:
    """A running `ostrya up` and everything it has started."""

    def __init__(self, process: "subprocess.Popen[bytes]", run: str, log: Path) -> None:
        self.process, self._run, self._log = process, run, log

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def says(self, words: str) -> None:
        deadline = time.monotonic() + START_S
        while words not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def has_processes(self, count: int) -> None:
        deadline = time.monotonic() + START_S
        while len(self.processes()) < count:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def processes(self) -> list[int]:
        return marked(self._run, variable=RUN)

    def everything_ends(self) -> bool:
        deadline = time.monotonic() + END_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.processes()


@contextmanager
def ostrya_up(tmp_path: Path, *words: str, terminal: bool = False) -> Iterator[Up]:
    run, log = uuid.uuid4().hex, tmp_path / "output"
    environment = {**os.environ, RUN: run, "TMPDIR": str(tmp_path), "COLUMNS": "200", "TERM": "xterm"}
    command = [sys.executable, "-m", "ostrya.cli.main", "up", *words]
    log.touch()
    reading, writing = os.openpty() if terminal else os.pipe()
    copier = threading.Thread(target=copy, args=(reading, log))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, env=environment)
    os.close(writing)
    copier.start()
    up = Up(process, run, log)
    try:
        yield up
    finally:
        process.kill()
        process.wait()
        for pid in up.processes():
            os.kill(pid, signal.SIGKILL)
        copier.join(END_S)


def redis_pid(tmp_path: Path) -> int:
    (log,) = tmp_path.glob("ostrya-*/redis.log")
    found = re.search(r"pid=(\d+), just started", log.read_text())
    assert found is not None
    return int(found[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def copy(reading: int, log: Path) -> None:
    with log.open("ab", buffering=0) as out:
        try:
            while some := os.read(reading, 4096):
                out.write(some)
        except OSError:
            pass  # a terminal whose other side is closed ends with EIO
    os.close(reading)


def test_up_check_passes_the_acceptance_scenario(tmp_path: Path) -> None:
    with ostrya_up(tmp_path, "--check") as up:
        code = up.process.wait(CHECK_S)
        assert code == 0, up.output()
        assert "✗" not in up.output()
        assert up.output().count("✓") == 16
        assert up.everything_ends()


def test_up_serves_on_a_terminal_until_ctrl_c_and_leaves_nothing(tmp_path: Path) -> None:
    with ostrya_up(tmp_path, "--workers", "1", "--port", str(free_port()), terminal=True) as up:
        up.says("Ctrl-C stops everything.")
        target = up.output().partition("ostrya chat --target ")[2].split()[0]
        with Client(target) as client:
            assert client.generate("The sky is", temperature=0.0, max_tokens=4).read()
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(END_S) == 0
        assert up.everything_ends()
    assert not list(tmp_path.glob("ostrya-*"))


def test_nothing_outlives_an_up_that_was_killed(tmp_path: Path) -> None:
    with ostrya_up(tmp_path) as up:
        # up, the router, two workers and their engines; Redis hides its environment and is found by its log
        up.has_processes(6)
        redis = redis_pid(tmp_path)
        assert is_running(redis)
        up.process.kill()
        up.process.wait()
        assert up.everything_ends()
        assert not is_running(redis)


def test_a_child_that_cannot_start_is_named_with_its_own_words(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"not a model")
    with ostrya_up(tmp_path, "--model", str(model)) as up:
        assert up.process.wait(START_S) == 1
        assert "exited with code 1" in up.output()
        assert str(model) in up.output()
        assert up.everything_ends()
    assert list(tmp_path.glob("ostrya-*/*.log"))
