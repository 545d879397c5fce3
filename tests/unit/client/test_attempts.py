import pytest

from ostrya.client.attempts import MAX_TRIES, Attempts
from ostrya.errors import InvalidRequest, Overloaded, Unavailable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_servers_wait_is_taken() -> None:
    assert Attempts(None).delay_after(Overloaded("full", retry_after_s=0.7)) == 0.7


def test_an_error_without_pushback_is_raised() -> None:
    with pytest.raises(InvalidRequest):
        Attempts(None).delay_after(InvalidRequest("text", "''", "not empty"))


def test_three_tries_are_the_most() -> None:
    attempts = Attempts(None)
    for _ in range(MAX_TRIES - 1):
        attempts.delay_after(Unavailable("down"))
    with pytest.raises(Unavailable):
        attempts.delay_after(Unavailable("down"))


def test_a_wait_longer_than_the_time_left_is_not_begun() -> None:
    clock = Clock()
    attempts = Attempts(2.0, clock=clock)
    clock.now += 1.5
    assert attempts.remaining_s() == pytest.approx(0.5)
    with pytest.raises(Overloaded):
        attempts.delay_after(Overloaded("full", retry_after_s=0.6))
    assert attempts.delay_after(Overloaded("full", retry_after_s=0.4)) == 0.4
