"""Whether an engine hangs: it is silent, or a step takes far longer than its like. Pure; fed with the engine's reports.

Time is counted as *heard* time: what passed while the listener listened and the engine could have run. A listener that
was stopped heard nothing, and a process that waits for a CPU is slow, not stuck; neither counts against the engine.
"""

import time
from collections.abc import Callable

from ostrya.engine.types import Shape, StepReport

LOOK_S = 0.25
"""Between two looks. What takes longer than two of them was the listener's own pause."""
SILENCE_S = 5.0
"""50 heartbeats; they go out during steps too, from a thread that computes nothing."""
MIN_STEP_S = 5.0
"""No step is called stuck sooner: pages that come back from disk, a clock that the chip throttles."""
MAX_STEP_S = 300.0
"""For a step that compiles a late shape, and until a first step has ended: minutes at most."""
STEP_RATIO = 10.0
"""So much longer than the longest of its like. Within one shape, context makes a step a few times longer, not ten."""
MEMORY = 0.99
"""Weight of the longest at each step of that shape: after some hundred ordinary steps it is forgotten."""
QUIET_S = 1.0
"""From here on it is worth asking the kernel whether the engine waits for a CPU."""


class Pace:
    """How long steps take, by shape."""

    def __init__(self) -> None:
        self._longest: dict[Shape, float] = {}

    def learn(self, shape: Shape, step_s: float) -> None:
        """A step has ended that did not compile."""
        self._longest[shape] = max(step_s, MEMORY * self._longest.get(shape, 0.0))

    def limit_s(self, shape: Shape) -> float:
        """After this a step of that shape is stuck."""
        like_s = self._longest.get(shape)
        if like_s is None:
            # Each other shape gives an upper estimate: time grows at most with tokens and with pages.
            others = (longest * _growth(known, shape) for known, longest in self._longest.items())
            like_s = min(others, default=MAX_STEP_S)
        return min(MAX_STEP_S, max(MIN_STEP_S, STEP_RATIO * like_s))


class Pulse:
    """Of one engine process, from when it is warm. `look` every LOOK_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pace = Pace()
        self._spoke_at = self._looked_at = clock()
        self._silent_s = self._step_s = 0.0
        self._num_steps = self._num_late = 0
        self._shape: Shape | None = None
        self._is_compiling = False

    @property
    def age_s(self) -> float:
        """Since the engine last spoke, by the clock."""
        return self._clock() - self._spoke_at

    @property
    def is_quiet(self) -> bool:
        """Something takes long enough to look closer."""
        return max(self._silent_s, self._step_s) >= QUIET_S

    @property
    def step_limit_s(self) -> float:
        """How long the step that runs may take."""
        if self._is_compiling or self._shape is None:
            return MAX_STEP_S
        return self._pace.limit_s(self._shape)

    @property
    def hang(self) -> str:
        """What is wrong, in words; empty = nothing."""
        if self._silent_s >= SILENCE_S:
            return f"engine process was silent for {self._silent_s:.1f} s"
        if self._step_s >= self.step_limit_s:
            return f"no step of the engine ended for {self._step_s:.1f} s; the limit is {self.step_limit_s:.1f} s"
        return ""

    def beat(self, report: StepReport) -> None:
        """Takes in one engine report."""
        load = report.load
        self._spoke_at, self._silent_s = self._clock(), 0.0
        is_late = load.num_late_shapes > self._num_late
        if report.step_s and report.shape is not None and not is_late:
            self._pace.learn(report.shape, report.step_s)
        has_ended = report.step_s > 0 or load.num_steps != self._num_steps
        is_idle = report.shape is None and load.num_running + load.num_waiting == 0
        if has_ended or is_idle:
            self._step_s, self._num_late, self._is_compiling = 0.0, load.num_late_shapes, False
        else:
            self._is_compiling = is_late
        self._num_steps = load.num_steps
        self._shape = None if has_ended else report.shape

    def look(self, *, waited_s: float = 0.0) -> None:
        """Counts the time since the last look, less `waited_s` for which the engine waited for a CPU."""
        now = self._clock()
        heard_s = max(0.0, min(now - self._looked_at, 2 * LOOK_S) - waited_s)
        self._looked_at = now
        self._silent_s += heard_s
        self._step_s += heard_s


def _growth(known: Shape, asked: Shape) -> float:
    """How many times longer a step of `asked` takes at most."""
    return max(1.0, asked.tokens / known.tokens) * max(1.0, asked.pages / known.pages)
