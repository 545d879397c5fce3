"""What the engine has learned from its steps: when the next is due, and how much of a prompt fits beside decode rows.
Pure: fed by the engine, read by it."""

from ostrya.engine.plan import Bucket, StepPlan

MIN_RATED_TOKENS = 16
"""Steps that prefill fewer tokens are bound by latency and say nothing about the prefill rate."""
RATE_MEMORY = 0.9
"""Weight of the past in the moving averages at each step that counts: about the last ten do."""
FORGET_RATIO = 1.01
"""By so much the shortest step of its shape is forgotten with each longer one."""
MIN_BESIDE = 16
"""A prompt gets on, however slow decoding is; also what is tried while nothing is known."""
PREFILL_SHARE = 0.5
"""Prompts have at least this share of the time, or a batch whose decoding alone takes longer would never let one in."""


class _Average:
    """A moving average of tokens a second."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, num_tokens: float, seconds: float) -> None:
        self._tokens = RATE_MEMORY * self._tokens + num_tokens
        self._seconds = RATE_MEMORY * self._seconds + seconds

    @property
    def rate(self) -> float:
        """0 = nothing was added."""
        return self._tokens / self._seconds if self._seconds else 0.0


class Pacing:
    """Of one engine."""

    def __init__(self, *, max_inter_token_s: float) -> None:
        """0 = prompts may take whatever the token budget leaves."""
        self._max_inter_token_s = max_inter_token_s
        self._shortest_s: dict[Bucket, float] = {}
        self._prefill = _Average()
        self._beside = _Average()
        self._decode = _Average()  # steps, not tokens

    def learn(self, plan: StepPlan, step_s: float) -> None:
        """A step has ended."""
        self._shortest_s[plan.bucket] = min(step_s, FORGET_RATIO * self._shortest_s.get(plan.bucket, step_s))
        num_prefilled = plan.num_tokens - plan.num_decode_rows
        if num_prefilled == 0:
            self._decode.add(1, step_s)
        if num_prefilled >= MIN_RATED_TOKENS:
            self._prefill.add(num_prefilled, step_s)
            if plan.num_decode_rows:
                self._beside.add(num_prefilled, step_s)

    def shortest_s(self, bucket: Bucket) -> float:
        """How long a step of that shape takes at least, of late; 0 = there was none."""
        return self._shortest_s.get(bucket, 0.0)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Over steps that prefilled; 0 = not yet measured."""
        return self._prefill.rate

    @property
    def prefill_limit(self) -> int | None:
        """Prompt tokens for a step with decode rows, None = no limit.

        Tokens a second, decoding included, times the seconds allowed: where the two agree, a step takes just that long.
        """
        if not self._max_inter_token_s:
            return None
        decode_s = 1 / self._decode.rate if self._decode.rate else 0.0
        allowed_s = max(self._max_inter_token_s, decode_s / (1 - PREFILL_SHARE))
        return max(MIN_BESIDE, int(allowed_s * (self._beside.rate or self._prefill.rate)))
