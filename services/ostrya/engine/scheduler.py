"""What the next step computes, and what its tokens change. Pure: no torch, no device; time is an argument.

plan() hands out places and pages, and may be called again before the step it planned is committed: what a sequence will
have then is counted already, and a token that only the device knows is fed forward there. commit() alone adds tokens
to a sequence; abort() alone may end one besides.

Why a step in flight can do no harm. Steps run in the order of their plans, each is launched before the next plan, and
what a plan hands out is written by that step or a later one. So a page released now, by whatever way, is read and
written by earlier steps before anyone new touches it; a page becomes matchable at the end of the plan whose step
writes its last token, and only later steps read it; and a row whose sequence ended meanwhile writes nothing but the
sequence's own page that is not full, which nobody can match.
"""

from array import array
from bisect import insort
from collections import deque
from collections.abc import Collection
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from ostrya.engine import buckets
from ostrya.engine.batch import RowTable, assemble
from ostrya.engine.config import EngineConfig
from ostrya.engine.kv.pool import PagePool
from ostrya.engine.kv.prefix import Chain, Events, PrefixCache
from ostrya.engine.plan import StepPlan
from ostrya.engine.sequence import Row, Sequence
from ostrya.engine.types import EngineRequest, FinishReason, Load, RequestId, SequenceOutput
from ostrya.errors import InvalidRequest
from ostrya.prefix import chain

_by_rank = attrgetter("rank")


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
        self._table = RowTable(num_slots=config.max_running, pages_per_row=self.ladder.pages[-1])
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting: list[Sequence] = []  # both in order of rank
        self._running: list[Sequence] = []
        self._in_flight: deque[list[Row]] = deque()
        self._num_submitted = 0
        self._num_preemptions = 0
        self._queried_tokens = 0
        self._hit_tokens = 0

    def submit(self, request: EngineRequest, *, now: float) -> None:
        """Puts a request at the end of the queue. InvalidRequest when it could never finish here."""
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
        self._num_submitted += 1
        ends = frozenset() if request.sampling.ignore_eos else self._eos_token_ids
        sequence = Sequence(
            request=request,
            chain=Chain(root, page_size=self._config.page_size),
            token_ids=array("I", request.token_ids),
            num_prompt=num_prompt,
            num_tokens=num_prompt,
            max_num_tokens=num_prompt + max_tokens,
            stop_token_ids=request.sampling.stop_token_ids | ends,
            rank=self._num_submitted,
            submitted_s=now,
        )
        self._sequences[request.request_id] = sequence
        insort(self._waiting, sequence, key=_by_rank)

    def abort(self, request_id: RequestId) -> None:
        """Frees the request's place and pages at once, even while a step has it. An unknown id is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    def plan(self, *, now: float) -> StepPlan | None:
        """The next step, to be launched before the next call; None when there is nothing to do before a commit."""
        if self._must_commit_first():
            return None
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
        rows.sort(key=lambda row: row.num_tokens > 1)
        plan = assemble(rows, table=self._table, ladder=self.ladder, page_size=self._config.page_size)
        for index, row in enumerate(rows):
            self._count_launched(row, index, now=now)
        self._in_flight.append(rows)
        return plan

    def commit(self, tokens: npt.NDArray[np.int32], *, now: float) -> list[SequenceOutput]:
        """Takes in the tokens [R] of the oldest step in flight. Rows whose sequence has ended meanwhile are ignored."""
        assert self._in_flight, "no step is in flight"
        rows = self._in_flight.popleft()
        return [
            self._add_token(row.sequence, token_id, now=now)
            for row, token_id in zip(rows, tokens.tolist(), strict=False)  # tokens has padding rows
            if row.wants_token and not row.sequence.ended
        ]

    def take_events(self) -> Events:
        """Resume points that came and went since the last call."""
        return self.prefix.take_events()

    def load(self) -> Load:
        """What the scheduler knows of the load; the engine adds what it measures."""
        in_flight = (
            min(row.start + row.num_tokens, row.sequence.num_prompt) - row.start
            for rows in self._in_flight
            for row in rows
            if row.start < row.sequence.num_prompt and not row.sequence.ended
        )
        queued = sum(sequence.num_uncomputed_prompt for sequence in self._sequences.values())
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            queued_tokens=queued + sum(in_flight),
            free_pages=self.pool.num_free,
            reusable_pages=self.pool.num_reusable,
            total_pages=self.pool.num_total,
            num_preemptions=self._num_preemptions,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
        )

    def _must_commit_first(self) -> bool:
        """Whether a row would be in the step whose last token the host has to know."""
        return bool(self._in_flight) and any(
            sequence.needs_host and sequence.num_tokens > len(sequence.token_ids) for sequence in self._running
        )

    def _decode_rows(self) -> list[Row]:
        rows, page_size = [], self._config.page_size
        # Those of higher rank are preempted first, so nobody loses a row that is already in the list.
        for sequence in self._running.copy():
            start = sequence.num_computed
            if sequence.num_tokens - start != 1 or sequence.num_tokens == sequence.max_num_tokens:
                continue  # it prefills, or all it may have is computed or on its way
            has_page = start < len(sequence.pages) * page_size or self._find_page(sequence)
            if has_page and sequence.is_running:
                rows.append(Row(sequence, start, 1, True))
        return rows

    def _find_page(self, sequence: Sequence) -> bool:
        """One more page, by preemption if need be; False when `sequence` itself was preempted."""
        while sequence.is_running:
            if self.pool.num_available:
                self._table.page_table[sequence.slot, len(sequence.pages)] = page = self.pool.allocate()
                sequence.pages.append(page)
                return True
            self._preempt(self._running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its full pages stay reusable, the rest is computed again."""
        self._running.remove(sequence)
        self._release(sequence)
        insort(self._waiting, sequence, key=_by_rank)
        self._num_preemptions += 1

    def _chunk(self, sequence: Sequence, budget: int) -> Row:
        num_tokens = min(sequence.num_uncomputed, self._config.max_prefill_chunk_tokens, budget)
        return Row(sequence, sequence.num_computed, num_tokens, num_tokens == sequence.num_uncomputed)

    def _admit_next(self) -> Sequence | None:
        """Moves the head of the queue to the running list with pages for all its tokens, or None."""
        if not self._waiting or len(self._running) == self._config.max_running:
            return None
        sequence, page_size = self._waiting[0], self._config.page_size
        num_tokens = len(sequence.token_ids)
        assert sequence.num_tokens == num_tokens, "a token of a waiting sequence is still on its way"
        # A hit never covers the last token: its logits are needed.
        digests = sequence.chain.digests(sequence.token_ids, num_pages=(num_tokens - 1) // page_size)
        cached = self.prefix.match(digests)
        num_new = -(-num_tokens // page_size) - len(cached)
        if num_new > self.pool.num_available - sum(self.pool.is_reusable(page) for page in cached):
            return None
        for page in cached:
            self.pool.reference(page)
        sequence.pages = cached + [self.pool.allocate() for _ in range(num_new)]
        sequence.slot = self._table.take(sequence.pages, sequence.request.sampling)
        sequence.num_computed = len(cached) * page_size
        sequence.num_registered_pages = len(cached)
        if sequence.started_s is None:
            sequence.num_cached_tokens = sequence.num_computed
            self._queried_tokens += num_tokens
            self._hit_tokens += sequence.num_computed
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_by_rank)
        return sequence

    def _count_launched(self, row: Row, index: int, *, now: float) -> None:
        sequence = row.sequence
        sequence.num_computed += row.num_tokens
        if row.wants_token:
            sequence.num_tokens += 1
            sequence.row = index
        if sequence.started_s is None:
            sequence.started_s = now
        self._register_pages(sequence)

    def _register_pages(self, sequence: Sequence) -> None:
        """Makes pages matchable whose tokens are all known here and computed by launched steps."""
        page_size = self._config.page_size
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // page_size
        for index in range(sequence.num_registered_pages, num_full):
            digest = sequence.chain.digest(sequence.token_ids, index)
            page = self.prefix.register(sequence.pages[index], digest, page_index=index)
            sequence.pages[index] = self._table.page_table[sequence.slot, index] = page
            sequence.num_registered_pages = index + 1

    def _add_token(self, sequence: Sequence, token_id: int, *, now: float) -> SequenceOutput:
        sequence.token_ids.append(token_id)
        reason = None
        if token_id in sequence.stop_token_ids:
            reason = FinishReason.STOP
        elif len(sequence.token_ids) == sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            self._register_pages(sequence)
        else:
            self._end(sequence)
        request_id, token_ids = sequence.request.request_id, (token_id,)
        if sequence.num_generated > 1:
            return SequenceOutput(request_id, token_ids, reason)
        started_s = now if sequence.started_s is None else sequence.started_s
        return SequenceOutput(
            request_id,
            token_ids,
            reason,
            num_cached_tokens=sequence.num_cached_tokens,
            queue_s=started_s - sequence.submitted_s,
            prefill_s=now - started_s,
        )

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        del self._sequences[sequence.request.request_id]
        if sequence.is_running:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._table.give_back(sequence.slot)
        self.pool.release(sequence.pages)
        sequence.slot = -1
        sequence.pages = []
        sequence.num_computed = 0
        sequence.num_registered_pages = 0
