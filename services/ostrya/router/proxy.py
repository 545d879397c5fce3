"""Stop 5 of a request: the way to a replica and back, whatever happens to replicas meanwhile.

Before the first token a failed try starts again elsewhere; after it the answer *continues* elsewhere, from the prompt
and the tokens already received: noise is keyed by absolute position, so the continuation is exact.
"""

from array import array
from collections.abc import AsyncGenerator, Callable, Set
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
from ostrya.router.offload import Offload
from ostrya.router.settings import RouterSettings
from ostrya.router.spans import Try, attempt
from ostrya.router.types import WorkerId
from ostrya.router.waiting import WaitingRoom
from ostrya.service.status import error_of, retry_after_s
from ostrya.service.tracing import NO_SPAN, Span

_NEVER_SENT = "failed to connect to all addresses"
"""gRPC's words for a call that never left; without them it would count as one that the replica had and failed."""

_AGAIN_S = 0.1
"""Before asking again replicas that turned a request away and are still routable: their health is about to say why."""


class _TurnedAway(Unavailable):
    """The replica is draining, ending or not there; it did no harm to the request, nor the request to it."""


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
    logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()
    """One for each of token_ids, if asked for."""
    prompt_logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()
    """On the first part, if asked for."""
    is_simulated: bool = False
    """Its replica computes nothing. Known of the first and the last part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be answered."""

    ticket: Ticket
    prompt: "array[int]"
    sampling: convert.Sampling
    routing: Routing
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    span: Span = NO_SPAN
    """Of the whole request; each try becomes a part of it."""


class Proxy:
    """Forwards jobs to the fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        room: WaitingRoom,
        metrics: RouterMetrics,
        model: str,
        settings: RouterSettings,
        offload: Offload,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._room = room
        self._metrics = metrics
        self._model = model
        self._max_attempts = settings.max_attempts
        self._no_replica_wait_s = settings.no_replica_wait_s
        self._offload = offload
        self._clock = clock

    async def stream(self, job: Job) -> AsyncGenerator[Part, None]:
        """The parts of the answer, the last one with a finish reason.

        Closing or cancelling it cancels the replica's work and leaves no count and no place behind. Raises what the
        last try met: NoReplica, Overloaded, Unavailable; DeadlineExceeded; or what the replica has against the request.
        """
        prompt = await self._offload.run(lambda: convert.prompt_message(job.prompt), num_bytes=4 * len(job.prompt))
        tries = _Tries(self._room.arrival())
        received = tries.received
        cached_tokens: int | None = None
        while True:
            decision = await self._choose(job, tries)
            worker_id, num_before = decision.choice.worker_id, len(received)
            if tries.failure is not None:
                self._metrics.retries.labels("after_first_token" if received else "before_first_token").inc()
            is_refused = False
            try:
                async with (
                    attempt(job.span, decision) as this,
                    aclosing(self._try(job, prompt, this, received)) as messages,
                ):
                    async for message in messages:
                        cached_tokens = message.usage.cached_tokens if cached_tokens is None else cached_tokens
                        received.extend(message.token_ids)
                        yield Part(
                            token_ids=tuple(message.token_ids),
                            finish_reason=message.finish_reason,
                            cached_tokens=cached_tokens,
                            worker_id=worker_id,
                            decision_id=decision.decision_id,
                            logprobs=tuple(message.logprobs),
                            prompt_logprobs=tuple(message.prompt_logprobs),
                            is_simulated=message.usage.simulated,
                        )
                        if message.finish_reason:
                            return
            except (Unavailable, Overloaded) as error:
                is_refused = len(received) == num_before
                tries.failed(worker_id, error, has_progressed=not is_refused)
            finally:
                # What was refused never took a place there, so nothing got free.
                if is_refused:
                    self._room.look()
                else:
                    self._room.freed()

    async def _choose(self, job: Job, tries: "_Tries") -> Decision:
        """Where the next try goes. Whoever finds nobody waits for a replica, and so does who comes after them."""
        if tries.num_faults >= self._max_attempts:
            raise tries.cause
        if tries.failure is not None or not self._room.num_waiting:
            decision = None if tries.num_full >= self._max_attempts else await _choice(job, excluded=tries.tried)
            if decision is not None:
                return decision
            if isinstance(tries.failure, Overloaded) and not tries.may_wait:
                raise tries.failure
        if tries.failure is not None:
            after_s = retry_after_s(tries.failure) if isinstance(tries.failure, Overloaded) else None
            self._room.pause(after_s or _AGAIN_S)
        while True:
            await self._wait(job, tries)
            decision = await _choice(job)
            if decision is not None:
                return decision

    async def _wait(self, job: Job, tries: "_Tries") -> None:
        """Returns when it is this request's turn to try; raises when its time is over."""
        is_new = not tries.may_wait
        tries.wait_began(self._clock())
        until = min(tries.waits_since + self._no_replica_wait_s, job.ticket.deadline)
        with job.span.child("ostrya.queue"):
            is_called = await self._room.wait(tries.arrival, until=until, is_new=is_new)
        if is_called:
            return
        if until == job.ticket.deadline:
            raise DeadlineExceeded("the request's deadline passed while it waited for a replica")
        if self._fleet.snapshot().replicas:
            raise Overloaded(f"no replica had a place for the request within {self._no_replica_wait_s:g} s; try later")
        raise NoReplica(f"no replica became routable within {self._no_replica_wait_s:g} s")

    async def _try(
        self, job: Job, prompt: worker_pb2.WorkerServiceGenerateRequest, this: Try, received: "array[int]"
    ) -> AsyncGenerator[worker_pb2.WorkerServiceGenerateResponse, None]:
        """One replica's messages, the last one with a finish reason. Unavailable or Overloaded: try another."""
        decision = this.decision
        worker_id = decision.choice.worker_id
        request = convert.worker_request(
            prompt,
            request_id=f"{job.ticket.request_id}.{decision.decision_id}",
            model=self._model,
            received=received,
            sampling=job.sampling,
            bad_words=job.bad_words,
            priority=job.priority,
            namespace=job.ticket.namespace,
        )
        remaining_s = job.ticket.deadline - self._clock()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        uncached = len(job.prompt) + len(received) - decision.choice.cached_tokens
        flight = self._fleet.begin(worker_id, prefill_tokens=uncached)
        timeout_s = remaining_s if isfinite(remaining_s) else None
        call = self._fleet.stub(worker_id).Generate(request, timeout=timeout_s, metadata=this.headers())
        try:
            async for message in call:
                # gRPC's stand-in for bytes that do not decode; its types do not say so.
                if not isinstance(message, worker_pb2.WorkerServiceGenerateResponse):
                    raise Unavailable(f"replica {worker_id} answered what does not decode")
                this.message(message)
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
        # How gRPC itself ends the calls of a server that stops; our servicers never answer these.
        if code is grpc.StatusCode.CANCELLED:
            return _TurnedAway(f"replica {worker_id} is ending")
        # A fault in the replica's own code, or in what gRPC made of its bytes.
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            return Unavailable(f"replica {worker_id} ended the call with {code.name}")
        failure = error_of(error)
        if type(failure) is Unavailable and (retry_after_s(failure) is not None or _NEVER_SENT in str(failure)):
            return _TurnedAway(str(failure))
        return failure


async def _choice(job: Job, *, excluded: Set[WorkerId] = frozenset()) -> Decision | None:
    await job.routing.prepare()
    return job.routing.choose(excluded=excluded)


class _Tries:
    """What a request has met since its last token: a long answer may outlive many replicas, so each starts anew."""

    def __init__(self, arrival: int) -> None:
        self.arrival = arrival
        self.received: array[int] = array("I")
        self.tried: set[WorkerId] = set()
        self.failure: OstryaError | None = None
        self.num_faults = 0
        """Replicas that failed it. It may be why they did, so these are few."""
        self.num_full = 0
        """Replicas that had no place."""
        self.waits_since = 0.0
        self._has_waited = False

    @property
    def may_wait(self) -> bool:
        """Full replicas do not end it: it has waited already, or has begun, and failing would lose that."""
        return self._has_waited or bool(self.received)

    @property
    def cause(self) -> OstryaError:
        """The last failure."""
        assert self.failure is not None
        return self.failure

    def failed(self, worker_id: WorkerId, error: OstryaError, *, has_progressed: bool) -> None:
        """A try has ended without a finish reason."""
        if has_progressed:
            self.tried, self.num_faults, self.num_full, self._has_waited = set(), 0, 0, False
        self.failure = error
        self.tried.add(worker_id)
        if isinstance(error, Overloaded) and retry_after_s(error) is not None:
            self.num_full += 1
        elif not isinstance(error, _TurnedAway):
            self.num_faults += 1

    def wait_began(self, now: float) -> None:
        """Now, or earlier if it was turned away since. All replicas may be asked again afterwards."""
        if not self._has_waited:
            self._has_waited, self.waits_since = True, now
        self.tried.clear()
        self.num_full = 0
