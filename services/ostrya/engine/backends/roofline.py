"""A backend without mathematics: each step takes the time that `ostrya capacity` predicts for it, and its tokens are
drawn by a function of what the row already knows. For load tests of everything else at full size. No torch.

A token depends on the row's last token, its position and, unless it is greedy, its noise, which is a function of (seed,
position): so it is the same in every batch, and on the worker that goes on with the stream. What a row forbids is
never drawn, and a grammar is followed; other sampling parameters change nothing. No answer ends by itself: only a
grammar that is complete, a stop token that happens to come, or max_tokens end it. Log probabilities are numbers of the
right form.

Steps run one after another on the real clock. Nobody waits here but who asks a step for its tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ostrya.capacity.estimate import efficiency
from ostrya.capacity.published import Engine
from ostrya.engine.backends.base import LoadedModel
from ostrya.engine.backends.roofline_model import simulated
from ostrya.engine.buckets import Growth
from ostrya.engine.config import EngineConfig
from ostrya.engine.noise import uniform
from ostrya.engine.plan import I32, Bucket, Mask, Processors, Scores, Scoring, StepPlan
from ostrya.engine.step_model import StepModel
from ostrya.engine.world import ALONE, World
from ostrya.errors import ConfigError

FIRST_PLAIN_TOKEN = 256
"""Low ids are often special tokens or single bytes."""
_NOISE_BITS = 24
"""Of plan.uniform."""
_CHOSEN_LOGPROB, _NEXT_LOGPROB = -0.5, -2.0
"""Of the token that was drawn, and of the likeliest beside it."""

_Allowed = npt.NDArray[np.bool_]


def load_runner(config: EngineConfig, world: World = ALONE) -> tuple["RooflineRunner", LoadedModel]:
    """A RunnerFactory. ConfigError if the model is not known or does not fit on the slice."""
    began = time.monotonic()
    found = simulated(config)
    limit = found.spec.max_context_tokens
    if (wanted := config.max_context_tokens) is not None and not 1 <= wanted <= limit:
        raise ConfigError([f"max_context_tokens is {wanted}; the model allows 1 to {limit}"])
    factors = efficiency(Engine.SERVING, found.where.chip.name)
    runner = RooflineRunner(
        StepModel(found.spec, found.where, efficiency=factors),
        vocab_size=config.vocab_size or found.spec.vocab_size,
        never=config.eos_token_ids,
    )
    return runner, LoadedModel(
        context_tokens=wanted or limit,
        vocab_size=runner.vocab_size,
        load_s=time.monotonic() - began,
        weights=found.description,
        limit=StepModel(found.spec, found.where),
        num_pages=found.num_pages,
        is_simulated=True,
    )


class RooflineRunner:
    """A Runner. `model` says how long a step takes; tokens in `never` are drawn only where a grammar wants one."""

    growth = Growth()
    num_cached_shapes = 0

    def __init__(
        self,
        model: StepModel,
        *,
        vocab_size: int,
        never: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.vocab_size = vocab_size
        self._model = model
        self._clock, self._sleep = clock, sleep
        self._never = [token_id for token_id in never if token_id < vocab_size]
        self._usual_V = np.arange(vocab_size) >= min(FIRST_PLAIN_TOKEN, vocab_size // 2)
        self._usual_V[self._never] = False
        self._ends_V = np.zeros(vocab_size, np.bool_)
        self._ends_V[self._never] = True
        self._drawn = self._usual_V.nonzero()[0].astype(np.int32)
        self._last_tokens: I32 = np.zeros(1, np.int32)
        self._free_s = float("-inf")
        """When the device has done all that was launched."""
        self._shapes: set[Bucket] = set()
        self._num_late_shapes = 0
        self._warm = False

    @property
    def num_shapes(self) -> int:
        return len(self._shapes)

    @property
    def num_late_shapes(self) -> int:
        return self._num_late_shapes

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        """Compiling is not simulated."""
        self._shapes.update(buckets)
        self._warm = True

    def execute(self, plan: StepPlan) -> "RooflineStep":
        if plan.bucket not in self._shapes:
            self._shapes.add(plan.bucket)
            self._num_late_shapes += self._warm
        self._free_s = max(self._clock(), self._free_s) + self._model.seconds(plan).seconds
        self._last_tokens = tokens = self._tokens(plan)
        scores = None if plan.scoring is None else _scores(plan.scoring, tokens, vocab_size=self.vocab_size)
        return RooflineStep(tokens, scores, done_s=self._free_s, clock=self._clock, sleep=self._sleep)

    def close(self) -> None:
        self._sleep(max(0.0, self._free_s - self._clock()))

    def _tokens(self, plan: StepPlan) -> I32:
        rows = slice(plan.num_rows)
        index_R = plan.logits_index[rows]
        source_R = plan.token_source[index_R]
        last_R = np.where(source_R < 0, plan.token_ids[index_R], self._last_tokens[source_R])
        noise_R = np.where(plan.temperature[rows] > 0, plan.uniform[rows] * 2**_NOISE_BITS, 0).astype(np.uint64)
        seeds_R = last_R.astype(np.uint64) << np.uint64(_NOISE_BITS) | noise_R
        share_R = uniform(seeds_R, plan.kv_lens[rows]).astype(np.float64)
        tokens = self._drawn[(share_R * len(self._drawn)).astype(np.int64)]
        if plan.processors is not None:
            for row, allowed_V in self._bound(plan.processors):
                candidates = allowed_V.nonzero()[0]
                tokens[row] = candidates[int(share_R[row] * len(candidates))]
        return tokens

    def _bound(self, processors: Processors) -> "Iterator[tuple[int, _Allowed]]":
        """Rows that may not draw every token, with what they may: at least one."""
        bias = processors.bias
        is_ban = bias.value == -np.inf
        words_of = {} if processors.mask is None else _by_row(processors.mask)
        for row in sorted({*bias.row[is_ban].tolist(), *words_of}):
            allowed_V = np.ones(self.vocab_size, np.bool_)
            if row in words_of:
                allowed_V = _bits(words_of[row], self.vocab_size)
            allowed_V[bias.token[is_ban & (bias.row == row)]] = False
            if row in words_of and allowed_V[self._never].any():
                # The form is complete, and what could be added to it says nothing.
                yield row, allowed_V & self._ends_V
            elif allowed_V.any():
                usual_V = allowed_V & self._usual_V
                yield row, usual_V if usual_V.any() else allowed_V


class RooflineStep:
    """A StepHandle: the tokens are known, and told when the step would have ended."""

    def __init__(
        self,
        tokens: I32,
        scores: Scores | None,
        *,
        done_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._tokens, self._scores, self._done_s = tokens, scores, done_s
        self._clock, self._sleep = clock, sleep

    def done(self) -> bool:
        return self._clock() >= self._done_s

    def tokens(self) -> I32:
        self._wait()
        return self._tokens

    def scores(self) -> Scores | None:
        self._wait()
        return self._scores

    def _wait(self) -> None:
        while (left_s := self._done_s - self._clock()) > 0:
            self._sleep(left_s)


def _by_row(mask: Mask) -> dict[int, I32]:
    return dict(zip(mask.row.tolist(), mask.words, strict=True))


def _bits(words_W: I32, size: int) -> _Allowed:
    """[size] tokens beyond the words are not allowed."""
    bits = np.unpackbits(words_W.view(np.uint8), bitorder="little")[:size]
    allowed_V = np.zeros(size, np.bool_)
    allowed_V[: len(bits)] = bits
    return allowed_V


def _scores(scoring: Scoring, tokens: I32, *, vocab_size: int) -> Scores:
    """Every token as the likeliest, and after it those with the next ids."""
    targets_N = np.concatenate([tokens[scoring.row], scoring.target])
    rank_K = np.arange(int(scoring.num_top.max()))
    logprob_K = np.where(rank_K == 0, _CHOSEN_LOGPROB, _NEXT_LOGPROB - 0.5 * rank_K).astype(np.float32)
    return Scores(
        logprob=np.full(len(targets_N), _CHOSEN_LOGPROB, np.float32),
        top_ids=((targets_N[:, None] + rank_K) % vocab_size).astype(np.int32),
        top_logprobs=np.tile(logprob_K, (len(targets_N), 1)),
    )
