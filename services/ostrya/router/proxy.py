"""Stop 5 of a request: the way to a replica and back, whatever happens to replicas meanwhile.

Before the first token a failed try starts again elsewhere; after it the answer *continues* elsewhere, from the prompt
and the tokens already received: noise is keyed by absolute position, so the continuation is exact.
"""

from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from math import isfinite

import grpc

from ostrya.api.v1 import common_pb2, worker_pb2
from ostrya.errors import DeadlineExceeded, NoReplica, OstryaError, Overloaded, Unavailable
from ostrya.router import convert
from ostrya.router.admission import Ticket
from ostrya.router.decide import Routing
from ostrya.router.explain import Decision
from ostrya.router.fleet import Fleet
from ostrya.router.metrics import RouterMetrics
from ostrya.router.settings import RouterSettings
from ostrya.router.types import WorkerId
from ostrya.service.status import error_of

# How gRPC itself ends the calls of a server that stops or drops a connection; our servicers never answer these.
_STOPPED = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some tokens of an answer."""

    token_ids: tuple[int, ...]
    finish_reason: common_pb2.FinishReason.ValueType
    """UNSPECIFIED until the last part."""
    cached_tokens: int
    """Of the prompt, on the replica that computed it first."""
    worker_id: WorkerId
    decision_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be answered."""

    ticket: Ticket
    prompt: "array[int]"
    sampling: convert.Sampling
    routing: Routing


class Proxy:
    """Forwards jobs to the fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        metrics: RouterMetrics,
        model: str,
        settings: RouterSettings,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._model = model
        self._max_attempts = settings.max_attempts
        self._no_replica_wait_s = settings.no_replica_wait_s
        self._clock = clock

    async def stream(self, job: Job) -> AsyncGenerator[Part, None]:
        """The parts of the answer, the last one with a finish reason.

        Closing or cancelling it cancels the replica's work and leaves no count behind. Raises what the last try met:
        NoReplica, Overloaded, Unavailable; DeadlineExceeded; or what the replica has against the request.
        """
        received: array[int] = array("I")
        tried: set[WorkerId] = set()
        cached_tokens: int | None = None
        failure: OstryaError | None = None
        num_failed = 0
        while num_failed < self._max_attempts:
            decision = await self._choose(job, tried, failure)
            worker_id, num_before = decision.choice.worker_id, len(received)
            if failure is not None:
                self._metrics.retries.labels("after_first_token" if received else "before_first_token").inc()
            try:
                async with aclosing(self._try(job, decision, received)) as messages:
                    async for message in messages:
                        cached_tokens = message.usage.cached_tokens if cached_tokens is None else cached_tokens
                        received.extend(message.token_ids)
                        yield Part(
                            token_ids=tuple(message.token_ids),
                            finish_reason=message.finish_reason,
                            cached_tokens=cached_tokens,
                            worker_id=worker_id,
                            decision_id=decision.decision_id,
                        )
                        if message.finish_reason:
                            return
            except (Unavailable, Overloaded) as error:
                failure = error
                # A try that added tokens starts the count anew: a long answer may outlive many replicas.
                if len(received) > num_before:
                    tried, num_failed = set(), 0
                tried.add(worker_id)
                num_failed += 1
        assert failure is not None
        raise failure

    async def _choose(self, job: Job, tried: set[WorkerId], failure: OstryaError | None) -> Decision:
        """The next replica; waits for one a little, unless the untried ones have run out because all are full."""
        decision = job.routing.choose(excluded=tried)
        if decision is not None:
            return decision
        if isinstance(failure, Overloaded):
            raise failure
        tried.clear()
        give_up = min(self._clock() + self._no_replica_wait_s, job.ticket.deadline)
        while (left_s := give_up - self._clock()) > 0 and await self._fleet.wait_routable(timeout_s=left_s):
            decision = job.routing.choose()
            if decision is not None:
                return decision
        if self._clock() >= job.ticket.deadline:
            raise DeadlineExceeded("the request's deadline passed while no replica was routable")
        raise NoReplica(f"no replica became routable within {self._no_replica_wait_s:g} s")

    async def _try(
        self, job: Job, decision: Decision, received: "array[int]"
    ) -> AsyncGenerator[worker_pb2.WorkerServiceGenerateResponse, None]:
        """One replica's messages, the last one with a finish reason. Unavailable or Overloaded: try another."""
        worker_id = decision.choice.worker_id
        request = convert.worker_request(
            request_id=f"{job.ticket.request_id}.{decision.decision_id}",
            model=self._model,
            prompt=job.prompt,
            received=received,
            sampling=job.sampling,
            namespace=job.ticket.namespace,
        )
        remaining_s = job.ticket.deadline - self._clock()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        uncached = len(job.prompt) + len(received) - decision.choice.cached_tokens
        flight = self._fleet.begin(worker_id, prefill_tokens=uncached)
        call = self._fleet.stub(worker_id).Generate(request, timeout=remaining_s if isfinite(remaining_s) else None)
        try:
            async for message in call:
                flight.first_token()
                self._fleet.report(worker_id, message.load)
                yield message
                if message.finish_reason:
                    return
            raise Unavailable(f"replica {worker_id} ended the answer without a finish reason")
        except grpc.aio.AioRpcError as error:
            raise self._failure(worker_id, error) from error
        finally:
            call.cancel()
            flight.end()

    def _failure(self, worker_id: WorkerId, error: grpc.aio.AioRpcError) -> OstryaError:
        """What a failed call means: Unavailable and Overloaded may do better elsewhere, anything else would not."""
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            self._fleet.failed(worker_id)
        if code in _STOPPED:
            return Unavailable(f"replica {worker_id} ended the call with {code.name}")
        return error_of(error)
