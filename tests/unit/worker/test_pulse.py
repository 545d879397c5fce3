"""The step loop is dead when it is silent, and when it has work and makes no progress; never for a long step."""

import pytest

from ostrya.engine.types import Load, StepReport
from ostrya.worker.pulse import SILENCE_S, STALL_S, Pulse


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def is_alive(pulse: Pulse) -> bool:
    """A call, so that no check is taken to hold for the next one."""
    return pulse.is_alive


def beats(pulse: Pulse, time: Time, *, for_s: float, load: Load) -> None:
    """A report each second."""
    for _ in range(round(for_s)):
        time.now_s += 1
        pulse.beat(StepReport(load=load))


def test_silence_ends_it_and_a_word_brings_it_back() -> None:
    time = Time()
    pulse = Pulse(time)
    time.now_s += SILENCE_S - 0.1
    assert is_alive(pulse)
    time.now_s += 0.2
    assert not is_alive(pulse)
    assert pulse.age_s == pytest.approx(SILENCE_S + 0.1)
    pulse.beat(StepReport())
    assert (is_alive(pulse), pulse.age_s) == (True, 0)


def test_an_idle_engine_lives() -> None:
    time = Time()
    pulse = Pulse(time)
    beats(pulse, time, for_s=3 * STALL_S, load=Load(num_steps=5))
    assert is_alive(pulse)


@pytest.mark.parametrize("work", [Load(num_running=1, num_steps=5), Load(num_waiting=1, num_steps=5)])
def test_work_without_an_ended_step_stalls_it_however_it_beats(work: Load) -> None:
    time = Time()
    pulse = Pulse(time)
    beats(pulse, time, for_s=STALL_S, load=work)  # the first of them counts as a step
    assert is_alive(pulse)
    beats(pulse, time, for_s=2, load=work)
    assert not is_alive(pulse)
    beats(pulse, time, for_s=1, load=Load(num_running=1, num_steps=6))
    assert is_alive(pulse)
