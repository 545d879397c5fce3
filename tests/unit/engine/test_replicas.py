"""A replica of several processes over loopback: what the others replay, and how it fails whole. Fake runners."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from ostrya.engine import slice_wire as wire
from ostrya.engine.config import EngineConfig
from ostrya.engine.local_ranks import COMMAND, Follow, Status
from ostrya.engine.process import EngineProcess
from ostrya.engine.types import EngineRequest, RequestId, Sampling
from ostrya.engine.world import ONE_HOST, Slice
from ostrya.errors import EngineDied, ModelLoadError
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import Stopwatch, until

CONFIG = EngineConfig(
    model_path="/", model_name="fake", tokenizer_fingerprint="t", num_pages=257, page_size=4, max_running=4
)
"""Of one process."""
FAKES = "tests.fakes.runner"
WHOLE_S = 5.0
"""A replica that lost a host has failed within this."""


class Host:
    """A follower process as a host's supervisor would start it, and what it says."""

    def __init__(self, line: bytes, *, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    async def says(self, *, phase: str, step: int = 0) -> None:
        """Waits until it is there."""
        assert self.process.stdout is not None
        seen = Status(phase="")
        while (seen.phase, seen.step) != (phase, step):
            line = await asyncio.to_thread(self.process.stdout.readline)
            assert line, f"it ended after {seen}"
            seen = msgspec.json.decode(line, type=Status)

    async def last(self) -> Status:
        """What it says when it ends."""
        assert self.process.stdout is not None
        lines = await asyncio.to_thread(self.process.stdout.readlines)
        await asyncio.to_thread(self.process.wait, 10)
        return msgspec.json.decode(lines[-1], type=Status)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@dataclass(frozen=True, slots=True)
class Hosts:
    """Starts host 0 and others, on one port."""

    stack: ExitStack
    seen: Slice
    factory: str
    config: EngineConfig

    def join(self, host: int = 1, *, config: EngineConfig | None = None, secret: str = "", patch: str = "") -> Host:
        """Another host's process; `patch` is run in it first."""
        follow = Follow(
            config=config or self.config,
            factory=f"{FAKES}:{self.factory}",
            slice_=replace(self.seen, host=host, secret=secret),
            local_rank=0,
            parent=os.getpid(),
        )
        patched = [sys.executable, "-c", f"from ostrya.engine import follower\n{patch}\nfollower.main()"]
        started = Host(msgspec.json.encode(follow) + b"\n", command=patched if patch else list(COMMAND))
        self.stack.callback(started.end)
        return started

    async def lead(self) -> EngineProcess:
        """Host 0, warm."""
        factory = f"{FAKES}:{self.factory}"
        return await EngineProcess.start(self.config, factory=factory, slice_=self.seen, timeout_s=60)


@contextmanager
def hosts(factory: str = "load_paced_runner", *, num_hosts: int = 2, join_timeout_s: float = 30.0) -> Iterator[Hosts]:
    with ExitStack() as stack:
        names = tuple(f"w-{host}" for host in range(num_hosts))
        seen = Slice(num_hosts=num_hosts, port=free_port(), names=names, join_timeout_s=join_timeout_s)
        yield Hosts(stack, seen, factory, replace(CONFIG, tensor_parallel=num_hosts))


@asynccontextmanager
async def ending(process: EngineProcess) -> AsyncIterator[EngineProcess]:
    try:
        yield process
    finally:
        await process.close()


def request(request_id: str = "r", *, max_tokens: int = 40, prompt: int = 10) -> EngineRequest:
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=RequestId(request_id), token_ids=list(range(prompt)), sampling=sampling)


async def tokens_of(process: EngineProcess, asked: EngineRequest) -> list[int]:
    return [token_id async for output in process.submit(asked) for token_id in output.token_ids]


async def why_it_died(process: EngineProcess) -> str:
    """Of a replica that runs a long request meanwhile."""
    with pytest.raises(EngineDied) as caught:
        await tokens_of(process, request(max_tokens=900))
    return str(caught.value)


async def test_every_host_replays_the_plans_of_the_first_and_ends_with_it() -> None:
    alone = await EngineProcess.start(CONFIG, factory=f"{FAKES}:load_runner")
    async with ending(alone):
        expected = [await tokens_of(alone, request(f"{n}", prompt=n)) for n in range(1, 9)]
    with hosts("load_runner", num_hosts=3) as slice_:
        others = [slice_.join(host) for host in (2, 1)]
        async with ending(await slice_.lead()) as process:
            got = await asyncio.gather(*(tokens_of(process, request(f"{n}", prompt=n)) for n in range(1, 9)))
            num_steps = process.load.num_steps
            assert got == expected
            for other in others:
                await other.says(phase="following", step=num_steps)
            assert not process.dead.done()
        for other in others:
            last = await other.last()
            assert (last.phase, other.process.returncode) == ("ended", 0)
            assert last.detail.startswith("host 0 is gone")


async def test_ranks_of_one_host_are_started_by_the_first_and_die_with_it() -> None:
    config = replace(CONFIG, tensor_parallel=3)
    process = await EngineProcess.start(config, factory=f"{FAKES}:load_runner", slice_=ONE_HOST, timeout_s=60)
    async with ending(process):
        assert len(await tokens_of(process, request())) == 40
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not any(map(is_there, ranks)), timeout_s=10)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def fails_whole(factory: str, number: int, words: str) -> None:
    """With its second host, which gets the signal unless that is 0; then a new start works."""
    with hosts(factory) as slice_:
        other = slice_.join()
        async with ending(await slice_.lead()) as process:
            dying = asyncio.create_task(why_it_died(process))
            await until(lambda: process.load.num_steps > 0)
            watch = Stopwatch(process.pid, other.process.pid)
            if number:
                other.process.send_signal(number)
            assert f"the replica fails whole: host 1 of 2 (w-1) {words}" in await dying
            assert watch.seconds() < WHOLE_S
        slice_.join()
        async with ending(await slice_.lead()) as process:
            assert await tokens_of(process, request(max_tokens=2))


@pytest.mark.parametrize(
    ("factory", "number", "words"),
    [
        ("load_paced_runner", signal.SIGKILL, "closed the connection: its process ended"),
        ("load_breaking_follower", 0, "failed: RuntimeError: device lost"),
        ("load_diverging_follower", 0, "chose other tokens than rank 0, in step "),
    ],
)
async def test_a_replica_fails_whole_with_one_of_its_hosts(factory: str, number: int, words: str) -> None:
    await fails_whole(factory, number, words)


async def test_a_host_that_hangs_lags_or_loses_the_first_is_noticed_within_seconds() -> None:
    """All three at once, as each takes its time."""
    await asyncio.gather(
        fails_whole("load_paced_runner", signal.SIGSTOP, "was silent for 4."),
        fails_whole("load_slow_follower", 0, "lags: it has done step "),
        ends_with_the_first(signal.SIGSTOP, "host 0 was silent for 5 s"),
    )


async def ends_with_the_first(number: int, words: str) -> None:
    with hosts() as slice_:
        other = slice_.join()
        async with ending(await slice_.lead()) as process:
            os.kill(process.pid, number)
            assert (await other.last()).detail.startswith(words)
            assert other.process.returncode == 0


async def test_a_host_ends_with_the_first_that_is_killed() -> None:
    await ends_with_the_first(signal.SIGKILL, "host 0 is gone")


async def test_a_model_that_one_host_cannot_load_is_told_with_its_name() -> None:
    with hosts("refuse_as_follower") as slice_:
        slice_.join()
        said = "the replica fails whole: host 1 of 2 (w-1) failed: / is cut short: 12 of 40 bytes; fetch it again"
        assert await refused(slice_) == said


async def refused(slice_: Hosts) -> str:
    with pytest.raises(ModelLoadError) as caught:
        await slice_.lead()
    return str(caught.value)


async def test_hosts_that_do_not_join_are_named() -> None:
    with hosts(num_hosts=4, join_timeout_s=3) as slice_:
        slice_.join(1)
        slice_.join(3, secret="another")
        said = await refused(slice_)
        assert said.startswith("host 2 of 4 (w-2), host 3 of 4 (w-3) did not join within 3 s; ")
        assert "was refused: its slice secret is not host 0's" in said


@pytest.mark.parametrize(
    ("changes", "patch", "words"),
    [
        ({"page_size": 8}, "", "differs from host 0 in config, page_size: 8 / 4"),
        ({"model_path": "/usr", "compile_cache": "/tmp", "num_threads": 3}, "", ""),
        (
            {},
            "from ostrya.engine import handshake; handshake.version = lambda name: '9'",
            "has ostrya 9, host 0 0.1.0",
        ),
        ({}, "follower.wire.PROTOCOL = 7", "speaks version 7 of the channel, host 0 1"),
    ],
)
async def test_a_host_that_is_not_like_the_first_is_told_and_so_is_everybody(
    changes: dict[str, object], patch: str, words: str
) -> None:
    with hosts() as slice_:
        other = slice_.join(config=replace(slice_.config, **changes), patch=patch)
        if not words:
            async with ending(await slice_.lead()):
                return
        watch = Stopwatch()
        said = await refused(slice_)
        assert said.startswith("host 1 of 2 (w-1) ")
        assert words in said
        assert watch.seconds() < WHOLE_S
        assert words in (await other.last()).detail


async def test_other_weights_are_told_from_a_few_bytes_of_them(tmp_path: Path) -> None:
    for number, name in enumerate(("ours", "theirs")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        middle = 150_000
        (tmp_path / name / "model.safetensors").write_bytes(bytes(middle) + bytes([number]) * 300_000)
    with hosts() as slice_:
        ours, theirs = (replace(slice_.config, model_path=str(tmp_path / name)) for name in ("ours", "theirs"))
        slice_.join(config=theirs)
        said = await refused(Hosts(slice_.stack, slice_.seen, slice_.factory, ours))
        assert "host 1 of 2 (w-1) differs from host 0 in weights, model.safetensors: 450000 bytes " in said


async def test_garbage_and_a_second_process_of_a_rank_keep_nobody_out() -> None:
    with hosts(num_hosts=3) as slice_:
        leading = asyncio.create_task(slice_.lead())
        first = slice_.join(1)
        await first.says(phase="joined")
        with pytest.raises(ConnectionRefusedError):  # it listens where it was told, and nowhere else
            socket.create_connection(("127.0.0.2", slice_.seen.port))
        address = ("127.0.0.1", slice_.seen.port)
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", wire.HEAD.pack(1 << 31, 0), wire.HEAD.pack(3, 0) + b"\xc1ab"):
            with socket.create_connection(address) as stranger:
                stranger.sendall(garbage)
        second = slice_.join(1)
        detail = (await second.last()).detail
        assert detail.startswith("host 0 refuses this host: the place of host 1 of 3 (w-1) is taken by ")
        assert f"process {first.process.pid}" in detail
        slice_.join(2)
        async with ending(await leading) as process:
            assert await tokens_of(process, request(max_tokens=2))


async def test_a_host_that_starts_again_before_all_are_there_joins_again() -> None:
    with hosts(num_hosts=3) as slice_:
        leading = asyncio.create_task(slice_.lead())
        first = slice_.join(1)
        await first.says(phase="joined")
        first.end()
        slice_.join(1)
        slice_.join(2)
        async with ending(await leading) as process:
            assert await tokens_of(process, request(max_tokens=2))
