"""The table of published points is complete: every one has a source, and a reason where it is not used."""

from ostrya.capacity.chips import find_slice
from ostrya.capacity.models import models
from ostrya.capacity.published import POINTS, Engine, Use


def test_every_point_has_a_source_and_a_positive_value() -> None:
    for point in POINTS:
        assert point.source
        assert point.value > 0


def test_points_are_told_apart_by_name_and_place() -> None:
    assert len({(point.name, point.slice_name, point.measure) for point in POINTS}) == len(POINTS)


def test_points_that_cannot_be_compared_say_why() -> None:
    assert all(point.reason for point in POINTS if point.use is Use.NOT_COMPARABLE)


def test_points_that_are_compared_name_a_model_and_a_slice() -> None:
    for point in POINTS:
        if point.use is not Use.NOT_COMPARABLE:
            assert point.model in models()
            find_slice(point.slice_name)


def test_forced_acceptance_is_marked() -> None:
    for point in POINTS:
        assert point.forced == (point.acceptance_length > 1)


def test_each_engine_has_points_that_it_was_not_fitted_to() -> None:
    for engine in Engine:
        uses = [point.use for point in POINTS if point.engine is engine]
        assert Use.FITTED in uses
        assert Use.HELD_OUT in uses
