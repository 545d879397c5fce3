"""Numbers that others tell a router, made usable where they enter: load board rows, what rides on responses, GetInfo.

A count is a whole number that the admin API can pass on; a rate or a time is finite. What is out of range is clamped,
what is no number says nothing. Pure.
"""

import math

from ostrya.router.types import Load

MAX_COUNT = 2**32 - 1
MAX_TOTAL = 2**64 - 1
"""Of uint32 and uint64, in which counts are passed on."""

MAX_TOKENS_PER_S = 1e9
"""No replica prefills faster."""

MAX_STEP_S = 3600.0
"""No step takes longer, nor any part of one."""

MAX_CLOCK_OFFSET_S = 1e9
"""Thirty years: clocks that are further apart were never set."""


def load(
    *,
    num_running: float,
    num_waiting: float,
    queued_tokens: float,
    free_pages: float,
    reusable_pages: float,
    total_pages: float,
    prefill_tokens_per_s: float,
    queried_tokens: float,
    hit_tokens: float,
    step_base_s: float,
    step_row_s: float,
    step_prefill_token_s: float,
    step_kv_token_s: float,
) -> Load:
    """A load that can be calculated with, whatever was told."""
    return Load(
        num_running=count(num_running),
        num_waiting=count(num_waiting),
        queued_tokens=count(queued_tokens),
        free_pages=count(free_pages),
        reusable_pages=count(reusable_pages),
        total_pages=count(total_pages),
        prefill_tokens_per_s=_within(prefill_tokens_per_s, 0.0, MAX_TOKENS_PER_S),
        queried_tokens=count(queried_tokens, most=MAX_TOTAL),
        hit_tokens=count(hit_tokens, most=MAX_TOTAL),
        step_base_s=_within(step_base_s, 0.0, MAX_STEP_S),
        step_row_s=_within(step_row_s, 0.0, MAX_STEP_S),
        step_prefill_token_s=_within(step_prefill_token_s, 0.0, MAX_STEP_S),
        step_kv_token_s=_within(step_kv_token_s, 0.0, MAX_STEP_S),
    )


def count(told: float, *, most: int = MAX_COUNT) -> int:
    """0 to `most`; 0 for what is no number."""
    if told != told or told <= 0:
        return 0
    return most if told >= most else int(told)


def clock_offset_s(theirs_s: float, ours_s: float) -> float:
    """Their clock minus ours; 0 if they did not tell."""
    return _within(theirs_s - ours_s, -MAX_CLOCK_OFFSET_S, MAX_CLOCK_OFFSET_S) if theirs_s else 0.0


def _within(told: float, least: float, most: float) -> float:
    """0 for what is no number."""
    return 0.0 if math.isnan(told) else float(min(max(told, least), most))
