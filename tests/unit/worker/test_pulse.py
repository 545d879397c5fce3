"""An engine hangs when it is silent, or when a step takes far longer than its like; a slow machine is no reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.engine.types import Load, Shape, StepReport
from ostrya.worker.pulse import LOOK_S, MAX_STEP_S, MIN_STEP_S, SILENCE_S, STEP_RATIO, Pace, Pulse

DECODE = Shape(tokens=4, rows=4, pages=16)
PREFILL = Shape(tokens=512, rows=16, pages=16)
BUSY = Load(num_running=1, num_steps=5)

shapes = st.builds(Shape, tokens=st.integers(1, 8192), rows=st.integers(1, 256), pages=st.integers(1, 1024))
seconds = st.floats(0.0001, 20)


class Engine:
    """A pulse and the clock it reads; what the engine says is said here."""

    def __init__(self, load: Load = BUSY) -> None:
        self.now_s = 100.0
        self.load = load
        self.pulse = Pulse(lambda: self.now_s)
        self.says()

    def says(self, *, step_s: float = 0.0, shape: Shape | None = None, num_late: int = 0) -> None:
        """One report; with `step_s` a step has ended."""
        steps = self.load.num_steps + (step_s > 0)
        load = Load(num_running=self.load.num_running, num_steps=steps, num_late_shapes=num_late)
        self.load = load
        self.pulse.beat(StepReport(load=load, step_s=step_s, shape=shape))

    def passes(self, for_s: float, *, beats: Shape | None = None, num_late: int = 0, starved: float = 0.0) -> bool:
        """Looks on time; whether it hangs at the end. Beats of a step of shape `beats` come before each look."""
        for _ in range(round(for_s / LOOK_S)):
            self.now_s += LOOK_S
            if beats:
                self.says(shape=beats, num_late=num_late)
            self.pulse.look(waited_s=starved * LOOK_S)
            if self.pulse.hang:
                return True
        return False


def learned(step_s: float, shape: Shape = DECODE) -> Engine:
    """After some steps like that."""
    engine = Engine()
    for _ in range(20):
        engine.says(step_s=step_s, shape=shape)
    return engine


def test_silence_for_some_seconds_is_a_hang_and_says_so() -> None:
    engine = Engine()
    assert not engine.passes(SILENCE_S - LOOK_S)
    assert engine.passes(LOOK_S)
    assert engine.pulse.hang == "engine process was silent for 5.0 s"
    assert engine.pulse.age_s == pytest.approx(SILENCE_S)


def test_an_idle_engine_that_beats_lives_for_ever() -> None:
    engine = Engine(Load(num_steps=5))
    for _ in range(round(2 * MAX_STEP_S / LOOK_S)):
        engine.now_s += LOOK_S
        engine.says()
        engine.pulse.look()
        assert not engine.pulse.hang


def test_a_device_that_never_ends_its_step_is_found_in_seconds_although_the_engine_beats() -> None:
    engine = learned(0.03)
    assert not engine.passes(MIN_STEP_S - LOOK_S, beats=DECODE)
    assert engine.passes(LOOK_S, beats=DECODE)
    assert "no step of the engine ended for 5.0 s" in engine.pulse.hang


def test_that_nobody_waits_for_the_step_any_more_does_not_hide_it() -> None:
    engine = learned(0.03)
    engine.load = Load(num_steps=engine.load.num_steps)
    assert engine.passes(MIN_STEP_S, beats=DECODE)


@settings(deadline=None)
@given(step_s=seconds, times=st.floats(0.1, STEP_RATIO * 0.9))
def test_a_step_within_the_ratio_of_its_like_is_let_alone(step_s: float, times: float) -> None:
    engine = learned(step_s)
    assert not engine.passes(min(step_s * times, MAX_STEP_S - 1), beats=DECODE)


def test_a_first_long_prompt_after_short_steps_is_no_hang() -> None:
    engine = learned(0.5)  # a large model on a CPU
    assert not engine.passes(30, beats=PREFILL)


@settings(deadline=None)
@given(known=st.dictionaries(shapes, seconds, min_size=1), asked=shapes)
def test_a_shape_never_seen_may_take_as_long_as_its_size_explains(known: dict[Shape, float], asked: Shape) -> None:
    pace = Pace()
    for shape, step_s in known.items():
        pace.learn(shape, step_s)
    limit_s = pace.limit_s(asked)
    assert MIN_STEP_S <= limit_s <= MAX_STEP_S
    if asked in known:
        assert limit_s >= min(MAX_STEP_S, STEP_RATIO * known[asked])
    # Time that grows in proportion to tokens is the worst there is.
    larger = Shape(tokens=2 * asked.tokens, rows=asked.rows, pages=asked.pages)
    assert pace.limit_s(larger) >= limit_s or larger in known or asked in known


def test_the_longest_step_is_forgotten_after_some_hundred_ordinary_ones() -> None:
    engine = learned(3.0)
    for _ in range(500):
        engine.says(step_s=0.03, shape=DECODE)
    assert engine.passes(MIN_STEP_S, beats=DECODE)


def test_a_late_compile_gets_minutes_and_teaches_nothing() -> None:
    engine = learned(0.03)
    assert not engine.passes(MAX_STEP_S - 1, beats=DECODE, num_late=1)
    engine.says(step_s=MAX_STEP_S - 1, shape=DECODE, num_late=1)
    assert engine.passes(MIN_STEP_S, beats=DECODE, num_late=1)


def test_the_first_step_of_all_gets_minutes() -> None:
    assert not Engine().passes(MAX_STEP_S - 1, beats=PREFILL)


@settings(deadline=None)
@given(pause_s=st.floats(0, 1e6))
def test_a_listener_that_was_stopped_blames_nobody_for_what_it_could_not_hear(pause_s: float) -> None:
    engine = learned(0.03)
    engine.passes(1, beats=DECODE)
    engine.now_s += pause_s
    engine.pulse.look()
    assert not engine.pulse.hang
    assert not engine.passes(SILENCE_S - 2, beats=DECODE)


@settings(deadline=None)
@given(st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_looks_that_come_late_never_find_a_hang_sooner(gaps_s: list[float]) -> None:
    """The same silence, seen by a slow listener."""
    engine = Engine()
    for gap_s in gaps_s:
        engine.now_s += gap_s
        engine.pulse.look()
        if engine.pulse.hang:
            assert engine.now_s - 100 >= SILENCE_S - 1e-6
            return


def test_an_engine_that_waits_for_a_cpu_is_slow_and_not_stuck() -> None:
    assert not learned(0.03).passes(7 * SILENCE_S, starved=0.9)
    assert not learned(0.03).passes(7 * MIN_STEP_S, beats=DECODE, starved=0.9)
    assert learned(0.03).passes(2 * SILENCE_S, starved=0.1)
