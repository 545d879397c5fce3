"""Grammars are compiled beside the step loop, each in a thread of its own, within a time limit. Used by child.py.

A thread cannot be ended: one that is over its time is left to its end, which llguidance's own limits bound, and its
request is refused.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ostrya.engine.grammar import FIELD, Grammars, Matcher
from ostrya.engine.types import EngineRequest, RequestId
from ostrya.errors import InvalidRequest

COMPILE_LIMIT_S = 5.0
"""A grammar of 64 KiB takes a fraction of a second on an idle core."""
MAX_AT_ONCE = 2
"""The step loop needs a core."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """For the step loop: a request's grammar, or why there is none."""

    request: EngineRequest
    matcher: Matcher | InvalidRequest


class Compiling:
    """Requests on their way to the scheduler; all methods belong to the step loop."""

    def __init__(
        self,
        grammars: Grammars,
        post: Callable[[Compiled], None],
        *,
        limit_s: float = COMPILE_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` is called from other threads, once for each request."""
        self._grammars, self._post = grammars, post
        self._limit_s, self._clock = limit_s, clock
        self._waiting: deque[EngineRequest] = deque()
        self._started_s: dict[RequestId, float] = {}
        self._aborted: set[RequestId] = set()

    def begin(self, request: EngineRequest) -> None:
        """Compiles the request's grammar as soon as there is a place."""
        self._waiting.append(request)
        self._start()

    def abort(self, request_id: RequestId) -> None:
        """Nobody wants it any more. An unknown id is ignored."""
        if request_id in self._started_s:
            self._aborted.add(request_id)
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)

    def is_wanted(self, compiled: Compiled) -> bool:
        """Takes note that it is done; false if it was aborted meanwhile, or refused."""
        request_id = compiled.request.request_id
        is_known = self._started_s.pop(request_id, None) is not None
        is_aborted = request_id in self._aborted
        self._aborted.discard(request_id)
        self._start()
        return is_known and not is_aborted

    def overdue(self) -> dict[RequestId, InvalidRequest]:
        """Refusals of those that took too long."""
        if not self._started_s:
            return {}
        over = [one for one, started_s in self._started_s.items() if self._clock() - started_s > self._limit_s]
        for request_id in over:
            del self._started_s[request_id]
        refused = {one: self._refusal() for one in over if one not in self._aborted}
        self._aborted.difference_update(over)
        self._start()
        return refused

    def _start(self) -> None:
        while self._waiting and len(self._started_s) < MAX_AT_ONCE:
            request = self._waiting.popleft()
            self._started_s[request.request_id] = self._clock()
            threading.Thread(target=self._compile, args=(request,), name="grammar", daemon=True).start()

    def _compile(self, request: EngineRequest) -> None:
        grammar, first_output = request.sampling.grammar, len(request.token_ids) - request.num_output_tokens
        assert grammar is not None
        try:
            matcher = self._grammars.compile(grammar, output=request.token_ids[first_output:])
        except InvalidRequest as error:
            self._post(Compiled(request, error))
        else:
            self._post(Compiled(request, matcher))

    def _refusal(self) -> InvalidRequest:
        allowed = f"what compiles within {self._limit_s:g} s; make it simpler"
        return InvalidRequest(FIELD, "too complex", allowed)
