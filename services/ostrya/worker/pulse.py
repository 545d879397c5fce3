"""Whether the engine's step loop lives: what the health service `liveness` says. Pure; fed with the engine's reports.

Two things end a life: silence, and work without progress (a device that never ends its step; the loop still beats
then). A restart is the cure for both, so both limits are far above anything that heals by itself.
"""

import time
from collections.abc import Callable

from ostrya.engine.types import StepReport

SILENCE_S = 10.0
"""50 heartbeats, which go out during steps too; below process.SILENCE_LIMIT_S, after which the engine is killed."""
STALL_S = 300.0
"""No step ended although there is work. The longest step is one that compiles a late shape: minutes at most."""


class Pulse:
    """Starts alive: warm-up has ended when the worker makes one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spoke_at = self._moved_at = clock()
        self._num_steps = 0

    @property
    def age_s(self) -> float:
        """Since the engine last spoke."""
        return self._clock() - self._spoke_at

    @property
    def is_alive(self) -> bool:
        return self.age_s < SILENCE_S and self._clock() - self._moved_at < STALL_S

    def beat(self, report: StepReport) -> None:
        """Takes in one engine report."""
        load = report.load
        self._spoke_at = self._clock()
        if load.num_steps != self._num_steps or load.num_running + load.num_waiting == 0:
            self._moved_at = self._spoke_at
        self._num_steps = load.num_steps
