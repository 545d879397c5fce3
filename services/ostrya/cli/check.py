"""The acceptance scenario of `ostrya up --check`: each line it prints is something just seen on a real stack."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeAlias, TypeVar

from rich.console import Console

from ostrya.api.v1 import admin_pb2
from ostrya.cli.prompts import LIBRARY, MUSEUM, TASKS
from ostrya.cli.stack import REDIS, Stack
from ostrya.client import AsyncClient, AsyncStream, Message
from ostrya.errors import OstryaError

MIN_CACHED_TOKENS = 512
ANSWER_TIMEOUT_S = 120.0
"""Two CPU cores share eight answers."""
HEAL_S = 5.0
"""What the issue allows for a dead worker to vanish from routing, and for the index to be whole again."""
CANCEL_S = 0.5
BOARD_S = 1.0
"""A load report takes so long to come round at worst."""
RESTART_TIMEOUT_S = 90.0
POLL_S = 0.05


Seen: TypeAlias = admin_pb2.ListReplicasResponse
T = TypeVar("T")


class Check:
    """One run of the scenario against a started stack."""

    def __init__(self, stack: Stack, console: Console) -> None:
        self._stack, self._console = stack, console
        self._findings: list[bool] = []
        self._begun: list[asyncio.Task[object]] = []

    @property
    def passed(self) -> bool:
        """Nothing failed so far."""
        return all(self._findings)

    def saw(self, ok: bool, what: str) -> None:
        """Prints and remembers one finding."""
        self._findings.append(ok)
        mark = "[green]✓[/green]" if ok else "[red]✗[/red]"
        self._console.print(mark, end=" ")
        self._console.print(what, markup=False, soft_wrap=True)

    async def run(self) -> None:
        """All steps in order. A step that fails is a finding; the next one still runs."""
        async with AsyncClient(self._stack.target) as self._client:
            for step in (self._prefix, self._spread, self._cancel, self._kill_worker, self._lose_redis):
                try:
                    await step()
                except (OstryaError, TimeoutError) as error:
                    self.saw(False, f"{step.__name__.strip('_').replace('_', ' ')}: {type(error).__name__}: {error}")
                finally:
                    await self._end_begun()

    async def _prefix(self) -> None:
        streams = []
        for question in ("Who may enter the library?", "When does the library close?"):
            stream = self._ask(question, system=LIBRARY, max_tokens=16)
            began, first = time.monotonic(), await anext(stream)
            first_s = time.monotonic() - began
            text = first.text + await stream.read()
            streams.append(stream)
            assert stream.usage is not None
            self.saw(
                bool(text.strip()),
                f"answered on {stream.replica}: {stream.usage.prompt_tokens} prompt tokens, "
                f"{stream.usage.cached_tokens} cached, first token after {first_s * 1e3:.0f} ms",
            )
        one, two = streams
        assert two.usage is not None
        self.saw(one.replica == two.replica, f"the second question went to the same replica, {two.replica}")
        cached = two.usage.cached_tokens
        self.saw(cached >= MIN_CACHED_TOKENS, f"it reused {cached} tokens (at least {MIN_CACHED_TOKENS} asked for)")

    async def _spread(self) -> None:
        streams = [self._ask(task, max_tokens=24) for task in TASKS]
        answers = await _read_all(streams)
        counts = {name: sum(stream.replica == name for stream in streams) for name in self._stack.workers}
        self.saw(all(answers), f"{len(answers)} unrelated prompts at the same time: all answered")
        self.saw(all(counts.values()), f"every replica worked: {counts}")

    async def _cancel(self) -> None:
        stream = self._ask("Tell a long story.", max_tokens=1000, ignore_eos=True)
        await anext(stream)
        await self._until("one request running", lambda seen: _busy(seen) == (1, 1), HEAL_S)
        stream.close()
        freed_s = await self._until("none in flight", lambda seen: _busy(seen)[0] == 0, HEAL_S)
        idle_s = freed_s + await self._until("no replica busy", lambda seen: _busy(seen) == (0, 0), HEAL_S)
        self.saw(
            max(freed_s, idle_s - BOARD_S) <= CANCEL_S,
            f"cancelled in the middle: out of the router {freed_s * 1e3:.0f} ms later, "
            f"the load board says idle after {idle_s * 1e3:.0f} ms",
        )

    async def _kill_worker(self) -> None:
        undisturbed = await _read_all(self._long_answers())
        streams = self._long_answers()
        readers = [self._begin(_read(stream)) for stream in streams]
        victim = await self._one_that_streams(streams)
        num_hit = sum(stream.replica == victim for stream in streams)
        epoch = {one.worker_id: one.epoch for one in (await self._client.replicas()).replicas}[victim]
        self._stack.child(victim).kill_alone()
        killed = time.monotonic()
        late = self._begin(_read_all([self._ask(task, max_tokens=8) for task in TASKS[:4]]))
        gone_s = await self._until("the victim unroutable", lambda seen: not _routable(seen, victim, epoch), HEAL_S * 2)
        answers = await asyncio.gather(*readers)
        self.saw(True, f"{victim} killed while it streamed {num_hit} of {len(streams)} answers: all answered")
        same = sum(before == after for before, after in zip(undisturbed, answers, strict=True))
        self.saw(same == len(answers), f"{same} of {len(answers)} answers equal those of an undisturbed run")
        self.saw(all(await late), "requests sent right after the kill: all answered")
        self.saw(gone_s <= HEAL_S, f"{victim} gone from routing after {gone_s:.2f} s")
        await self._until("all READY", lambda seen: _num_ready(seen) == len(self._stack.workers), RESTART_TIMEOUT_S)
        self.saw(True, f"{victim} started again and READY {time.monotonic() - killed:.1f} s after the kill")

    async def _lose_redis(self) -> None:
        if not self._stack.has_redis:
            self.saw(False, "no Redis on this machine, so its loss cannot be tried")
            return
        await self._until("Redis followed", _follows_redis, HEAL_S)
        readers = [self._begin(_read(stream)) for stream in self._long_answers()]
        self._stack.hold_down(REDIS)
        noticed_s = await self._until("the loss noticed", lambda seen: not seen.redis_connected, HEAL_S)
        before = await self._client.replicas()
        # Its blocks are stored while nobody can be told.
        unheard = self._ask("What may visitors touch?", system=MUSEUM, max_tokens=4)
        answers = await asyncio.gather(*readers, _read(unheard))
        self.saw(
            all(answers), f"Redis killed, noticed after {noticed_s * 1e3:.0f} ms, {len(answers)} requests: all answered"
        )

        readers = [self._begin(_read(stream)) for stream in self._long_answers()]
        self._stack.release(REDIS)
        await self._stack.wait_redis(timeout_s=RESTART_TIMEOUT_S)
        whole = self._index_has(before, unheard.replica, more_blocks=MIN_CACHED_TOKENS // self._stack.tokens_per_block)
        healed_s = await self._until("the index whole", whole, HEAL_S)
        answers = await asyncio.gather(*readers)
        self.saw(all(answers), f"Redis back and empty, {len(answers)} requests meanwhile: all answered")
        self.saw(
            True,
            f"index whole {healed_s:.2f} s after it answered, with what {unheard.replica} stored while Redis was away",
        )

    def _begin(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Runs it beside the step; a step that fails takes it along."""
        task = asyncio.create_task(work)
        self._begun.append(task)
        return task

    async def _end_begun(self) -> None:
        for task in self._begun:
            task.cancel()
        await asyncio.gather(*self._begun, return_exceptions=True)
        self._begun.clear()

    @staticmethod
    def _index_has(before: Seen, replica: str, *, more_blocks: int) -> Callable[[Seen], bool]:
        least = {
            one.worker_id: one.indexed_blocks + more_blocks * (one.worker_id == replica) for one in before.replicas
        }

        def whole(seen: Seen) -> bool:
            blocks = {one.worker_id: one.indexed_blocks for one in seen.replicas}
            return _follows_redis(seen) and all(blocks.get(name, 0) >= count for name, count in least.items())

        return whole

    def _ask(self, question: str, *, max_tokens: int, system: str = "", ignore_eos: bool = False) -> AsyncStream:
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        return self._client.generate(
            messages=messages,
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            timeout_s=ANSWER_TIMEOUT_S,
        )

    def _long_answers(self) -> list[AsyncStream]:
        return [self._ask(task, max_tokens=48, ignore_eos=True) for task in TASKS]

    async def _one_that_streams(self, streams: Sequence[AsyncStream]) -> str:
        """A replica in the middle of at least two answers."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                open_on = Counter(one.replica for one in streams if one.started and one.usage is None)
                busiest = max(open_on, key=lambda name: open_on[name], default="")
                if busiest and open_on[busiest] >= 2:
                    return busiest
                await asyncio.sleep(POLL_S)

    async def _until(self, what: str, holds: Callable[[Seen], bool], timeout_s: float) -> float:
        """Seconds until the router's own list says so; TimeoutError."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if holds(await self._client.replicas()):
                        return time.monotonic() - began
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise TimeoutError(f"{what}: not seen within {timeout_s:.0f} s") from None


async def _read(stream: AsyncStream) -> str:
    async with stream:
        return await stream.read()


async def _read_all(streams: Sequence[AsyncStream]) -> list[str]:
    return await asyncio.gather(*(_read(stream) for stream in streams))


def _busy(seen: Seen) -> tuple[int, int]:
    """Requests in flight from this router, and running on replicas."""
    return sum(one.in_flight for one in seen.replicas), sum(one.load.num_running for one in seen.replicas)


def _routable(seen: Seen, name: str, epoch: int) -> bool:
    """Whether that very process still gets requests."""
    ready = admin_pb2.REPLICA_STATE_READY
    return any(one.worker_id == name and one.epoch == epoch and one.state == ready for one in seen.replicas)


def _follows_redis(seen: Seen) -> bool:
    return seen.redis_connected and seen.level == admin_pb2.KNOWLEDGE_LEVEL_FRESH


def _num_ready(seen: Seen) -> int:
    return sum(one.state == admin_pb2.REPLICA_STATE_READY for one in seen.replicas)
