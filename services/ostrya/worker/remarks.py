"""What in the engine's reports deserves a line in the log. The engine's process has no log of its own."""

import logging
import time
from collections.abc import Callable

from ostrya.engine.types import StepReport

log = logging.getLogger(__name__)

SLOW_RATIO = 4.0
"""Of what was expected: well beyond what the fit is wrong about."""
SLOW_S = 0.05
"""A step that ends sooner is slow to nobody."""
QUIET_S = 60.0
"""Between two lines about slow steps; a slow machine makes every step one."""


class Remarks:
    """Of one engine process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s = float("-inf")
        self._num_untold = 0
        self._has_told_of_pages = False

    def report(self, report: StepReport) -> None:
        """Takes in one engine report."""
        if report.expected_s and report.step_s > max(SLOW_S, SLOW_RATIO * report.expected_s):
            self._slow(report)
        load = report.load
        if load.num_page_leaks and not self._has_told_of_pages:
            self._has_told_of_pages = True
            fields = {
                "total": load.total_pages,
                "free": load.free_pages,
                "reusable": load.reusable_pages,
                "missing": load.total_pages - load.free_pages - load.reusable_pages,
            }
            log.error("pages of the idle engine are lost or still referenced", extra={"fields": fields})

    def _slow(self, report: StepReport) -> None:
        now = self._clock()
        if now - self._told_s < QUIET_S:
            self._num_untold += 1
            return
        work = report.work
        assert work is not None, "a step that was expected to take some time has done something"
        fields = {
            "seconds": round(report.step_s, 4),
            "expected_seconds": round(report.expected_s, 4),
            "rows": work.rows,
            "prefill_tokens": work.prefill_tokens,
            "kv_tokens": work.kv_tokens,
            "num_untold": self._num_untold,
        }
        log.warning("a step was slow", extra={"fields": fields})
        self._told_s, self._num_untold = now, 0
