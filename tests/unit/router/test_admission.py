"""Places in a router are bounded and always given back."""

import math

import pytest

from ostrya.errors import DeadlineExceeded, InvalidRequest, Overloaded
from ostrya.router.admission import Admission


def admission(*, places: int = 2) -> Admission:
    return Admission(max_in_flight=places, clock=lambda: 100.0)


def test_one_request_too_many_is_told_when_to_come_back() -> None:
    places = admission(places=1)
    with (
        places.admit(request_id="", remaining_s=None),
        pytest.raises(Overloaded, match="limit is 1") as refused,
        places.admit(request_id="", remaining_s=None),
    ):
        pass
    assert refused.value.retry_after_s > 0
    assert places.in_flight == 0


def test_a_place_is_given_back_however_the_request_ends() -> None:
    places = admission()
    with pytest.raises(KeyError), places.admit(request_id="", remaining_s=None):
        assert places.in_flight == 1
        raise KeyError
    assert places.in_flight == 0


@pytest.mark.parametrize(("remaining_s", "deadline"), [(31e6, 31e6 + 100), (3.2e7, math.inf), (math.inf, math.inf)])
def test_a_deadline_beyond_a_year_is_none(remaining_s: float, deadline: float) -> None:
    with admission().admit(request_id="", remaining_s=remaining_s) as ticket:
        assert ticket.deadline == deadline


def test_the_ticket_has_the_deadline_on_our_clock_and_an_id() -> None:
    with (
        admission().admit(request_id="", remaining_s=2.5) as one,
        admission().admit(request_id="x-1", remaining_s=None) as two,
    ):
        assert (one.deadline, two.deadline) == (102.5, math.inf)
        assert len(one.request_id) == 32
        assert (two.request_id, two.tenant, two.namespace) == ("x-1", "default", "")


@pytest.mark.parametrize("request_id", ["a b", "é", "x" * 129, "line\n"])
def test_ids_that_would_break_a_log_line_are_refused(request_id: str) -> None:
    with pytest.raises(InvalidRequest, match="request_id"), admission().admit(request_id=request_id, remaining_s=None):
        pass


def test_no_work_is_begun_after_the_deadline() -> None:
    for remaining_s in (0.0, -1.0, math.nan):
        with pytest.raises(DeadlineExceeded), admission().admit(request_id="", remaining_s=remaining_s):
            pass
