"""Asks replicas whose lease stays away whether they are there: a lost lease is a question, not an answer.

Asked is the address, over a connection made for it, with a deadline: a process that hangs, a host that vanished and
another worker at the same address do not answer for the replica, and what its old connection is worth does not matter.
The registry owns this and judges; whether the replica also serves is what its link hears.
"""

import asyncio
import logging
from collections.abc import Mapping, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.api.v1 import worker_pb2
from ostrya.api.v1.worker_pb2_grpc import WorkerServiceStub
from ostrya.router.pace import Pace
from ostrya.router.types import WorkerId
from ostrya.service.server import channel

if TYPE_CHECKING:
    from ostrya.api.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

log = logging.getLogger(__name__)

PERIOD_S = 1.0
DEADLINE_S = 1.0
MISSES = 2
"""In a row, before a replica that answered does no longer: 3 s at most, and a busy moment is forgiven."""
STRANGERS = 8
"""Of those that are not in the fleet, so many may be asked at the same time: they can be a thousand, whoever wrote them
into Redis, and who has requests must not wait for them."""


@dataclass(slots=True, eq=False)
class _Question:
    """One replica, asked again and again."""

    address: str
    task: "asyncio.Task[None]"
    is_stranger: bool
    is_answered: bool = False
    is_pending: bool = True
    """The first one is still open."""


class Questions:
    """A task for each replica that is asked. `close` at the end."""

    def __init__(self, *, pool: str, max_message_bytes: int) -> None:
        self._pool, self._max_message_bytes = pool, max_message_bytes
        self._open: dict[WorkerId, _Question] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._strangers = asyncio.Semaphore(STRANGERS)
        self._pace = Pace()

    def ask(self, wanted: Mapping[WorkerId, str], *, strangers: Set[WorkerId] = frozenset()) -> None:
        """From now on these at these addresses, about once a second, and nobody else; strangers only a few at a time,
        and so less often if they are many."""
        for worker_id, question in list(self._open.items()):
            if question.task.done():
                log.error("question ended by a fault of ours; asking again", exc_info=question.task.exception())
            is_same = wanted.get(worker_id) == question.address and (worker_id in strangers) is question.is_stranger
            if question.task.done() or not is_same:
                self._end(self._open.pop(worker_id).task)
        for worker_id in wanted.keys() - self._open.keys():
            asking = asyncio.create_task(self._repeat(worker_id, wanted[worker_id]), name=f"question {worker_id}")
            self._open[worker_id] = _Question(wanted[worker_id], asking, worker_id in strangers)

    def answers(self, worker_id: WorkerId) -> bool:
        """Whether it does; False also while the first question is open, and for who is not asked."""
        question = self._open.get(worker_id)
        return question is not None and question.is_answered

    def is_pending(self, worker_id: WorkerId) -> bool:
        """Whether it was asked just now for the first time; bounded by the deadline. A stranger's turn may come late,
        and nobody waits for its answer."""
        question = self._open.get(worker_id)
        return question is not None and question.is_pending and not question.is_stranger

    async def close(self) -> None:
        """Asks nobody any more."""
        self.ask({})
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _repeat(self, worker_id: WorkerId, address: str) -> None:
        clock, num_missed = asyncio.get_running_loop().time, 0
        while True:
            question = self._open[worker_id]
            async with AsyncExitStack() as places:
                if question.is_stranger:
                    await places.enter_async_context(self._strangers)
                await self._pace.turn()
                began = clock()
                is_there = await self._is_there(worker_id, address)
            num_missed = 0 if is_there else num_missed + 1
            question.is_pending = False
            question.is_answered = is_there or (question.is_answered and num_missed < MISSES)
            await asyncio.sleep(max(0.0, began + PERIOD_S - clock()))

    async def _is_there(self, worker_id: WorkerId, address: str) -> bool:
        async with channel(address, max_message_bytes=self._max_message_bytes) as way:
            worker: WorkerServiceAsyncStub = WorkerServiceStub(way)
            health = health_pb2_grpc.HealthStub(way)
            try:
                info, _ = await asyncio.gather(
                    worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=DEADLINE_S),
                    health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S),  # type: ignore[attr-defined]
                )
            except grpc.aio.AioRpcError:
                return False
        # Not a message: what came does not decode.
        is_told = isinstance(info, worker_pb2.GetInfoResponse)
        return is_told and info.worker_id == worker_id and info.pool == self._pool

    def _end(self, task: "asyncio.Task[None]") -> None:
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
