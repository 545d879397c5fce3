"""`make bench-peers` compares what runs, and says why the rest does not."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.bench.rounds import Case, Sides, Times, measure
from tests.bench.sides import NotRun, Side

CASE = Case(what="decode", batch=2, prompt_tokens=3, num_new=4)
FAKE = "tests.fakes.bench_side"


def test_a_side_that_is_not_installed_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotRun, match="/nowhere/python: No such file"):
        Side("peer", "/nowhere/python", FAKE, directory=tmp_path)


def test_a_side_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(NotRun, match=r"No module named tests\.fakes\.nothing"):
        Side("peer", sys.executable, "tests.fakes.nothing", directory=tmp_path)


def test_a_peer_that_dies_is_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    with closing(Sides()) as sides:
        for name, num_answers in (("ours", "1000"), ("peer", "5")):
            sides.running[name] = Side(name, sys.executable, FAKE, num_answers, directory=tmp_path)
        times = measure(CASE, sides, salt=0, rounds=4)
        assert list(sides.running) == ["ours"]
    assert sides.not_run == {"peer": "ended by SIGILL"}
    # One answer to warm up, then two a round.
    assert [len(times.net[name]) for name in ("ours", "peer")] == [4, 2]


def test_a_side_of_our_own_that_dies_ends_the_run(tmp_path: Path) -> None:
    with closing(Sides()) as sides, pytest.raises(NotRun, match="ended by SIGILL"):
        sides.running["ours"] = Side("ours", sys.executable, FAKE, "1", directory=tmp_path)
        measure(CASE, sides, salt=0, rounds=1)


def test_a_ratio_is_the_median_of_the_rounds_both_took() -> None:
    times = Times(CASE)
    times.net.update({"ours": [1.0, 2.0, 1.0, 9.0], "slow": [5.0, 5.0, 5.0, 5.0], "peer": [2.0, 6.0, 4.0]})
    assert times.ratio("ours", "peer") == 3.0
    assert times.best(["slow", "peer", "absent"]) == "peer"
    assert times.best(["absent"]) is None
