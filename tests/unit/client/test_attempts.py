import math

import pytest

from ostrya.client.attempts import MAX_TRIES, PATIENCE_S, Attempts, Peer, Unreached
from ostrya.errors import InvalidRequest, Overloaded, Unavailable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts_of(timeout_s: float | None = None, *, clock: Clock | None = None, has_answered: bool = False) -> Attempts:
    peer = Peer("router:1")
    peer.has_answered = has_answered
    return Attempts(timeout_s, peer=peer, clock=clock or Clock())


def test_a_timeout_of_centuries_is_none_and_one_that_is_no_number_is_refused() -> None:
    assert attempts_of(1e6).remaining_s() == 1e6
    assert attempts_of(1e10).remaining_s() is None
    assert attempts_of(math.inf).remaining_s() is None
    with pytest.raises(InvalidRequest, match="timeout_s is nan"):
        attempts_of(math.nan)


def test_the_servers_wait_is_taken() -> None:
    assert attempts_of().delay_after(Overloaded("full", retry_after_s=0.7)) == 0.7


def test_an_error_without_pushback_is_raised() -> None:
    with pytest.raises(InvalidRequest):
        attempts_of().delay_after(InvalidRequest("text", "''", "not empty"))


def test_three_tries_are_the_most() -> None:
    attempts = attempts_of()
    for _ in range(MAX_TRIES - 1):
        attempts.delay_after(Unavailable("down"))
    with pytest.raises(Unavailable):
        attempts.delay_after(Unavailable("down"))


def test_a_wait_longer_than_the_time_left_is_not_begun() -> None:
    clock = Clock()
    attempts = attempts_of(2.0, clock=clock)
    clock.now += 1.5
    assert attempts.remaining_s() == pytest.approx(0.5)
    with pytest.raises(Overloaded):
        attempts.delay_after(Overloaded("full", retry_after_s=0.6))
    assert attempts.delay_after(Overloaded("full", retry_after_s=0.4)) == 0.4


def test_a_target_that_never_answered_is_given_up_soon() -> None:
    attempts = attempts_of()
    waits = [attempts.delay_after(Unreached("refused")) for _ in range(MAX_TRIES - 1)]
    assert sum(waits) < 0.5
    with pytest.raises(Unreached):
        attempts.delay_after(Unreached("refused"))


def test_a_router_that_has_answered_before_is_waited_for_with_growing_pauses() -> None:
    clock = Clock()
    attempts, waits = attempts_of(clock=clock, has_answered=True), []
    with pytest.raises(Unreached):
        while True:
            waits.append(attempts.delay_after(Unreached("refused")))
            clock.now += waits[-1]
    assert waits[:5] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert max(waits) == 1.0
    assert PATIENCE_S - 1.0 < sum(waits) <= PATIENCE_S


def test_the_patience_for_a_router_never_exceeds_the_callers_time() -> None:
    clock = Clock()
    attempts = attempts_of(0.25, clock=clock, has_answered=True)
    clock.now += attempts.delay_after(Unreached("refused"))
    with pytest.raises(Unreached):
        attempts.delay_after(Unreached("refused"))


def test_a_router_that_answers_again_is_worth_the_full_patience_again() -> None:
    clock = Clock()
    attempts = attempts_of(clock=clock, has_answered=True)
    attempts.delay_after(Unreached("refused"))
    clock.now += PATIENCE_S
    attempts.delay_after(Unavailable("no replica", retry_after_s=0.1))
    assert attempts.delay_after(Unreached("refused")) == 0.1
