"""What a request's sampling wants beyond temperature, top_k and top_p, token by token: the host's side.

The scheduler makes one RowProcessors with a sequence that wants anything, and tells it of every token; batch.py puts
what it says into the plan, and backends/kernels/processors.py applies it. Pure, no torch.
"""

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Self

import numpy as np

from ostrya.engine.plan import F32, I32
from ostrya.engine.types import EngineRequest, FinishReason

if TYPE_CHECKING:
    from ostrya.engine.grammar import Matcher


class RowProcessors:
    """Of one sequence."""

    def __init__(
        self, request: EngineRequest, *, eos_token_ids: Collection[int], matcher: "Matcher | None" = None
    ) -> None:
        self._matcher = matcher
        sampling = self.sampling = request.sampling
        endings = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
        self._endings = np.array(sorted(endings), np.int32)
        singles = {word[0]: -np.inf for word in sampling.bad_words if len(word) == 1}
        bias = {**sampling.logit_bias, **singles}
        self._bias_tokens = np.fromiter(bias.keys(), np.int32, len(bias))
        self._bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self._words = _Words(word for word in sampling.bad_words if len(word) > 1)
        self._first_output = len(request.token_ids) - request.num_output_tokens
        self._seen = _seen(request)

    @classmethod
    def of(
        cls, request: EngineRequest, *, eos_token_ids: Collection[int], matcher: "Matcher | None" = None
    ) -> Self | None:
        """None for a request that wants nothing, so that it costs nothing."""
        sampling = request.sampling
        wants = (
            sampling.min_p > 0
            or sampling.typical_p < 1
            or sampling.logit_bias
            or sampling.bad_words
            or sampling.min_tokens > 0
            or _has_penalty(request)
            or matcher is not None
        )
        return cls(request, eos_token_ids=eos_token_ids, matcher=matcher) if wants else None

    @property
    def needs_host(self) -> bool:
        """Whether `bias` must know the token before: what is on its way to it cannot be planned past."""
        return bool(self._words) or self._matcher is not None

    @property
    def num_mask_words(self) -> int:
        """Of its grammar's mask; 0 = it has none."""
        return 0 if self._matcher is None else self._matcher.num_words

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why its grammar lets nothing more come; None while it does."""
        if self._matcher is None or not self._matcher.is_over:
            return None
        return FinishReason.LENGTH if self._matcher.has_failed else FinishReason.STOP

    def fill_mask(self, words_W: I32) -> None:
        """What its grammar allows next."""
        assert self._matcher is not None
        self._matcher.fill(words_W)

    def add(self, token_id: int) -> None:
        """The output has one token more."""
        if self._matcher is not None:
            self._matcher.consume(token_id)
        if self._seen is not None:
            self._seen.add(token_id)

    def bias(self, token_ids: "array[int]", *, num_generated: int) -> tuple[I32, F32]:
        """Tokens and what is added to their logits, for the token after `token_ids`; a token may come twice."""
        forbidden = self._words.last_tokens(token_ids, first=self._first_output) if self._words else []
        tokens = [self._bias_tokens, np.array(forbidden, np.int32)]
        if num_generated < self.sampling.min_tokens:
            tokens.append(self._endings)
        num_forbidden = sum(map(len, tokens[1:]))
        values = np.append(self._bias_values, np.full(num_forbidden, -np.inf, np.float32))
        return np.concatenate(tokens), values

    def seen(self) -> tuple[I32, F32]:
        """The tokens that the penalties are about, each once, and how often the output has them."""
        return (_NO_IDS, _NO_NUMBERS) if self._seen is None else self._seen.arrays()


_NO_IDS, _NO_NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class _Words:
    """Token sequences of two or more, found by the token before their last. Empty is false."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._by_token: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            self._by_token[word[-2]].append(word)

    def __bool__(self) -> bool:
        return bool(self._by_token)

    def last_tokens(self, token_ids: "array[int]", *, first: int) -> list[int]:
        """Those that would complete a sequence which begins at `first` or later."""
        if len(token_ids) <= first:
            return []
        return [
            word[-1]
            for word in self._by_token.get(token_ids[-1], ())
            if len(word) - 1 <= len(token_ids) - first and tuple(token_ids[1 - len(word) :]) == word[:-1]
        ]


class _Seen:
    """Distinct tokens and their counts, in arrays that grow by doubling."""

    def __init__(self, prompt: I32, output: I32) -> None:
        tokens, counts = np.unique(output, return_counts=True)
        only_prompt = np.setdiff1d(prompt, tokens)
        self._tokens = np.concatenate([tokens, only_prompt])
        self._counts = np.concatenate([counts, np.zeros(len(only_prompt))]).astype(np.float32)
        self._size = len(self._tokens)
        self._place = {token: place for place, token in enumerate(self._tokens.tolist())}

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, self._size)
        if place == self._size:
            if self._size == len(self._tokens):
                room = np.zeros(max(16, self._size), np.int32)
                self._tokens = np.append(self._tokens, room)
                self._counts = np.append(self._counts, room.astype(np.float32))
            self._tokens[place] = token_id
            self._size += 1
        self._counts[place] += 1

    def arrays(self) -> tuple[I32, F32]:
        """Copies: a plan must not change while a step runs."""
        return self._tokens[: self._size].copy(), self._counts[: self._size].copy()


def _seen(request: EngineRequest) -> _Seen | None:
    if not _has_penalty(request):
        return None
    ids = np.array(request.token_ids, np.int32)
    first_output = len(ids) - request.num_output_tokens
    # Only the repetition penalty is about the prompt.
    prompt = ids[:first_output] if request.sampling.repetition_penalty != 1 else ids[:0]
    return _Seen(prompt, ids[first_output:])


def _has_penalty(request: EngineRequest) -> bool:
    sampling = request.sampling
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
