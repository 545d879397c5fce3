"""Stop 1 of a request: a place in the router, or a refusal that says when to come back."""

import math
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ostrya.errors import DeadlineExceeded, InvalidRequest, Overloaded
from ostrya.service.bounds import ENDLESS_S

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

RETRY_AFTER_S = 0.5
"""A full router frees places all the time; half a second spreads those who come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """An admitted request."""

    request_id: str
    tenant: str
    namespace: str
    """Separates tenants' caches; part of the digest chain."""
    deadline: float
    """On the router's clock; inf = none."""


class Admission:
    """Bounds the requests inside this router."""

    def __init__(self, *, max_in_flight: int, clock: Callable[[], float]) -> None:
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.in_flight = 0

    @contextmanager
    def admit(self, *, request_id: str, remaining_s: float | None, num_places: int = 1) -> Iterator[Ticket]:
        """A place until the block ends, for each of its answers. `remaining_s` is what the client's deadline leaves;
        None: it has none. Who finds one place gets all, or a small router would never take many answers.

        InvalidRequest for an unusable id, Overloaded if every place is taken, DeadlineExceeded if no time is left.
        """
        if request_id and not _REQUEST_ID.fullmatch(request_id):
            raise InvalidRequest(
                "request_id", ascii(request_id[:128]), "1 to 128 printable ASCII characters without spaces"
            )
        if remaining_s is not None and not remaining_s > 0:  # also for NaN
            raise DeadlineExceeded("the request's deadline passed before it was admitted")
        if self.in_flight >= self._max_in_flight:
            raise Overloaded(
                f"{self.in_flight} requests are in flight; the router's limit is {self._max_in_flight}; try later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.in_flight += num_places
        try:
            yield Ticket(
                request_id=request_id or uuid.uuid4().hex,
                tenant="default",
                namespace="",
                deadline=math.inf if remaining_s is None or remaining_s > ENDLESS_S else self._clock() + remaining_s,
            )
        finally:
            self.in_flight -= num_places
