"""What the next step computes, and what its tokens change. Pure: no torch, no device; time is an argument.

plan() hands out places and pages. commit() alone adds tokens and progress to a sequence, and makes its pages
matchable; abort() alone may end a sequence besides. Steps run in the order of their plans, so pages that abort() frees
while a step still writes them are safe.
"""

from array import array
from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ostrya.engine import buckets
from ostrya.engine.batch import assemble
from ostrya.engine.config import EngineConfig
from ostrya.engine.kv.pool import PagePool
from ostrya.engine.kv.prefix import Chain, Events, PrefixCache
from ostrya.engine.plan import StepPlan
from ostrya.engine.processors import RowProcessors
from ostrya.engine.scoring import RowScores
from ostrya.engine.sequence import Row, Sequence
from ostrya.engine.types import EngineRequest, FinishReason, Load, RequestId, SequenceOutput, TokenScore
from ostrya.errors import InvalidRequest
from ostrya.prefix import chain

if TYPE_CHECKING:
    from ostrya.engine.grammar import Matcher

NO_SCORES: Mapping[int, RowScores] = MappingProxyType({})
NO_ROW_SCORES = RowScores()


class Scheduler:
    """First come, first served; one token budget a step: decode rows first, then prefill chunks."""

    def __init__(self, config: EngineConfig, *, context_tokens: int, eos_token_ids: Collection[int]) -> None:
        self._config = config
        self._eos_token_ids = frozenset(eos_token_ids)
        self.pool = PagePool(config.num_pages)
        self.prefix = PrefixCache(self.pool, routing_stride=config.routing_stride)
        # One sequence alone must fit, or it would preempt itself for ever.
        self.context_tokens = min(context_tokens, self.pool.num_total * config.page_size)
        self.ladder = buckets.ladder(
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            page_size=config.page_size,
            context_tokens=self.context_tokens,
        )
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self._in_flight: list[Row] | None = None
        self._num_preemptions = 0
        self._queried_tokens = 0
        self._hit_tokens = 0

    def submit(self, request: EngineRequest, *, now: float, matcher: "Matcher | None" = None) -> None:
        """Puts a request, with its compiled grammar if it has one, at the end of the queue. InvalidRequest when it
        could never finish here."""
        assert (request.sampling.grammar is None) == (matcher is None), "a grammar is compiled before"
        num_prompt, max_tokens = len(request.token_ids), request.sampling.max_tokens
        if num_prompt < 1 or max_tokens < 1 or num_prompt + max_tokens > self.context_tokens:
            raise InvalidRequest(
                "prompt + max_tokens",
                f"{num_prompt} + {max_tokens} tokens",
                f"at least 1 each, together at most {self.context_tokens}; shorten the prompt or lower max_tokens",
            )
        assert request.request_id not in self._sequences, f"request {request.request_id} is already here"
        root = chain.root(
            chain.ChainKey(
                model=self._config.model_name,
                tokenizer_fingerprint=self._config.tokenizer_fingerprint,
                namespace=request.cache_namespace,
            )
        )
        sequence = Sequence(
            request=request,
            chain=Chain(root, page_size=self._config.page_size),
            token_ids=array("I", request.token_ids),
            submitted_s=now,
            processors=RowProcessors.of(request, eos_token_ids=self._eos_token_ids, matcher=matcher),
        )
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: RequestId) -> None:
        """Frees the request's place and pages at once, even while a step has it. An unknown id is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def plan(self, *, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        assert self._in_flight is None, "the step before must be committed first"
        num_preemptions = self._num_preemptions
        rows = self._decode_rows()
        budget = self._config.max_step_tokens - len(rows)
        for sequence in self._running:
            if sequence.num_uncomputed > 1 and budget:
                rows.append(self._chunk(sequence, budget))
                budget -= rows[-1].num_tokens
        # Who was just preempted waits for pages, not for this step.
        while budget and num_preemptions == self._num_preemptions and (admitted := self._admit_next()):
            rows.append(self._chunk(admitted, budget))
            budget -= rows[-1].num_tokens
        if not rows:
            return None
        for row in rows:
            if row.sequence.started_s is None:
                row.sequence.started_s = now
        rows.sort(key=lambda row: row.num_tokens > 1)
        self._in_flight = rows
        return assemble(rows, ladder=self.ladder, page_size=self._config.page_size)

    def commit(
        self, tokens: npt.NDArray[np.int32], *, now: float, scores: Mapping[int, RowScores] = NO_SCORES
    ) -> list[SequenceOutput]:
        """Takes in the tokens [R] of the planned step, and scores by row. Rows whose sequence was aborted meanwhile are
        ignored."""
        assert self._in_flight is not None, "no step is in flight"
        rows, self._in_flight = self._in_flight, None
        outputs = []
        for number, (row, token_id) in enumerate(zip(rows, tokens.tolist(), strict=False)):  # tokens has padding rows
            if row.sequence.ended:
                continue
            wants_token = row.wants_token
            row.sequence.num_computed += row.num_tokens
            self._register_pages(row.sequence)
            scored = scores.get(number, NO_ROW_SCORES)
            row.sequence.prompt_scores += scored.prompt
            if wants_token:
                outputs.append(self._add_token(row.sequence, token_id, scored.own, now=now))
        return outputs

    def take_events(self) -> Events:
        """Resume points that came and went since the last call."""
        return self.prefix.take_events()

    def load(self) -> Load:
        """What the scheduler knows of the load; the engine adds what it measures."""
        queued = sum(sequence.num_uncomputed_prompt for sequence in self._sequences.values())
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            queued_tokens=queued,
            free_pages=self.pool.num_free,
            reusable_pages=self.pool.num_reusable,
            total_pages=self.pool.num_total,
            num_preemptions=self._num_preemptions,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
        )

    def _decode_rows(self) -> list[Row]:
        decoding = [sequence for sequence in self._running if sequence.num_uncomputed == 1]
        # The last admitted is preempted first, so nobody loses a row that is already in the list.
        return [Row(sequence, 1) for sequence in decoding if self._find_page(sequence)]

    def _find_page(self, sequence: Sequence) -> bool:
        """Makes room for the next token, by preemption if need be; False when `sequence` itself was preempted."""
        while sequence in self._running and sequence.num_computed == len(sequence.pages) * self._config.page_size:
            if self.pool.num_available:
                sequence.pages.append(self.pool.allocate())
            else:
                self._preempt(self._running[-1])
        return sequence in self._running

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue; its full pages stay reusable, the rest is computed again."""
        self._running.remove(sequence)
        self._release_pages(sequence)
        self._waiting.appendleft(sequence)
        self._num_preemptions += 1

    def _chunk(self, sequence: Sequence, budget: int) -> Row:
        return Row(sequence, min(sequence.num_uncomputed, self._config.max_prefill_chunk_tokens, budget))

    def _admit_next(self) -> Sequence | None:
        """Moves the head of the queue to the running list with pages for all its tokens, or None."""
        if not self._waiting or len(self._running) == self._config.max_running:
            return None
        sequence, page_size = self._waiting[0], self._config.page_size
        num_tokens = len(sequence.token_ids)
        # A hit never covers the last token: its logits are needed.
        num_pages = 0 if sequence.num_unscored > 0 else (num_tokens - 1) // page_size
        digests = sequence.chain.digests(sequence.token_ids, num_pages=num_pages)
        cached = self.prefix.match(digests)
        num_new = -(-num_tokens // page_size) - len(cached)
        if num_new > self.pool.num_available - sum(self.pool.is_reusable(page) for page in cached):
            return None
        for page in cached:
            self.pool.reference(page)
        sequence.pages = cached + [self.pool.allocate() for _ in range(num_new)]
        sequence.num_computed = len(cached) * page_size
        sequence.num_registered_pages = len(cached)
        if sequence.started_s is None:
            sequence.num_cached_tokens = sequence.num_computed
            self._queried_tokens += num_tokens
            self._hit_tokens += sequence.num_computed
        self._running.append(self._waiting.popleft())
        return sequence

    def _register_pages(self, sequence: Sequence) -> None:
        num_full = sequence.num_computed // self._config.page_size
        for index in range(sequence.num_registered_pages, num_full):
            digest = sequence.chain.digest(sequence.token_ids, index)
            sequence.pages[index] = self.prefix.register(sequence.pages[index], digest, page_index=index)
        sequence.num_registered_pages = num_full

    def _add_token(self, sequence: Sequence, token_id: int, score: TokenScore | None, *, now: float) -> SequenceOutput:
        sequence.token_ids.append(token_id)
        if sequence.processors is not None:
            sequence.processors.add(token_id)
        started_s = now if sequence.started_s is None else sequence.started_s
        if sequence.num_generated == 1:
            sequence.prefill_s = now - started_s
        reason = self._finish_reason(sequence, token_id)
        if reason is not None:
            self._end(sequence)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            token_ids=(token_id,),
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens,
            queue_s=started_s - sequence.submitted_s,
            prefill_s=sequence.prefill_s,
            scores=() if score is None else (score,),
            prompt_scores=tuple(sequence.prompt_scores) if sequence.num_generated == 1 else (),
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        if token_id in sampling.stop_token_ids or (token_id in self._eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        if sequence.processors is not None and (reason := sequence.processors.finish_reason) is not None:
            return reason
        # submit() has checked that max_tokens ends within the context.
        return FinishReason.LENGTH if sequence.num_generated == sampling.max_tokens else None

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        del self._sequences[sequence.request.request_id]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release_pages(sequence)

    def _release_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed = 0
        sequence.num_registered_pages = 0
