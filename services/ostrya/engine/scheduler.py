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
from collections.abc import Collection, Mapping
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ostrya.engine import buckets
from ostrya.engine.batch import RowTable, assemble
from ostrya.engine.config import EngineConfig
from ostrya.engine.kv.pool import PageId, PagePool
from ostrya.engine.kv.prefix import Chain, Events, PrefixCache
from ostrya.engine.plan import StepPlan
from ostrya.engine.processors import RowProcessors
from ostrya.engine.scoring import RowScores
from ostrya.engine.sequence import Row, Sequence
from ostrya.engine.types import EngineRequest, FinishReason, Load, RequestId, SequenceOutput, TokenScore
from ostrya.engine.waiting import Waiting, by_rank
from ostrya.errors import InvalidRequest
from ostrya.prefix.chain import ChainKey, root

if TYPE_CHECKING:
    from ostrya.engine.grammar import Matcher

NOMINAL_TOKENS_PER_S = 1000.0
"""While nobody has measured how fast prompts are computed."""
NO_SCORES: Mapping[int, RowScores] = MappingProxyType({})
NO_ROW_SCORES = RowScores()


class _Step(NamedTuple):
    """A step in flight."""

    rows: list[Row]
    chunks: list[Row]
    """Those of them that are no decode rows; a chunk may go on into what was generated before a preemption."""


class Scheduler:
    """One token budget a step: decode rows first, then prefill chunks."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        context_tokens: int,
        eos_token_ids: Collection[int],
        growth: buckets.Growth = buckets.DOUBLING,
    ) -> None:
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
            growth=growth,
        )
        self._table = RowTable(num_slots=config.max_running, pages_per_row=self.ladder.pages[-1])
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting = Waiting()
        self._running: list[Sequence] = []  # in order of rank
        self._prefilling: list[Sequence] = []  # of those, with more than one token to compute; first admitted first
        self._needing_host: list[Sequence] = []  # of the running
        self._in_flight: deque[_Step] = deque()
        self._num_submitted = 0
        self._num_preemptions = 0
        self._queried_tokens = 0
        self._hit_tokens = 0

    def submit(self, request: EngineRequest, *, now: float, matcher: "Matcher | None" = None) -> None:
        """Puts a request, with its compiled grammar if it has one, at the end of the queue. InvalidRequest when it
        could never finish here."""
        assert (request.sampling.grammar is None) == (matcher is None), "a grammar is compiled before"
        sampling = request.sampling
        num_prompt, max_tokens = len(request.token_ids), sampling.max_tokens
        if num_prompt < 1 or max_tokens < 1 or num_prompt + max_tokens > self.context_tokens:
            raise InvalidRequest(
                "prompt + max_tokens",
                f"{num_prompt} + {max_tokens} tokens",
                f"at least 1 each, together at most {self.context_tokens}; shorten the prompt or lower max_tokens",
            )
        assert request.request_id not in self._sequences, f"request {request.request_id} is already here"
        key = ChainKey(
            model=self._config.model_name,
            tokenizer_fingerprint=self._config.tokenizer_fingerprint,
            namespace=request.cache_namespace,
        )
        self._num_submitted += 1
        processors = RowProcessors.of(request, eos_token_ids=self._eos_token_ids, matcher=matcher)
        ends = frozenset() if sampling.ignore_eos else self._eos_token_ids
        sequence = Sequence(
            request=request,
            chain=Chain(root(key), page_size=self._config.page_size),
            token_ids=array("I", request.token_ids),
            num_prompt=num_prompt,
            num_tokens=num_prompt,
            max_num_tokens=num_prompt + max_tokens,
            stop_token_ids=sampling.stop_token_ids | ends,
            rank=(-request.priority, self._num_submitted),
            submitted_s=now,
            processors=processors,
            is_plain=processors is None and sampling.num_top is None and sampling.num_prompt_top is None,
            needs_host=processors is not None and processors.needs_host,
        )
        self._sequences[request.request_id] = sequence
        # Hashed here, while a step runs, and not when it is planned.
        sequence.chain.digests(sequence.token_ids, num_pages=sequence.num_usable_pages)
        self._waiting.add(sequence)

    def abort(self, request_id: RequestId) -> None:
        """Frees the request's place and pages at once, even while a step has it. An unknown id is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)

    @property
    def is_idle(self) -> bool:
        """No request is here, and no step in flight."""
        return not self._sequences and not self._in_flight

    def plan(
        self, *, now: float, prefill_limit: int | None = None, tokens_per_s: float = NOMINAL_TOKENS_PER_S
    ) -> StepPlan | None:
        """The next step, to be launched before the next call; None when there is nothing to do before a commit.

        `prefill_limit`: prompt tokens that it may take beside decode rows, None = whatever the budget leaves.
        `tokens_per_s`: how fast prompts are computed here, which says what a cached one is worth.
        """
        if self._must_commit_first():
            return None
        num_preemptions = self._num_preemptions
        rows = self._decode_rows()
        budget = self._config.max_step_tokens - len(rows)
        if rows and prefill_limit is not None:
            budget = min(budget, prefill_limit)
        # Who was just preempted waits for pages, not for this step.
        if num_preemptions == self._num_preemptions:
            self._admit(budget, tokens_per_s=tokens_per_s)
            if num_preemptions != self._num_preemptions:
                rows = [row for row in rows if row.sequence.is_running]
        chunks = sorted(self._chunks(budget), key=lambda row: row.num_tokens > 1)
        rows += chunks
        if not rows:
            return None
        plan = assemble(rows, table=self._table, ladder=self.ladder, page_size=self._config.page_size)
        self._count_launched(rows, now=now)
        self._in_flight.append(_Step(rows, chunks))
        return plan

    def commit(
        self, tokens: npt.NDArray[np.int32], *, now: float, scores: Mapping[int, RowScores] = NO_SCORES
    ) -> list[SequenceOutput]:
        """Takes in the tokens [R] of the oldest step in flight, and scores by row. Rows whose sequence has ended
        meanwhile are ignored."""
        assert self._in_flight, "no step is in flight"
        rows = self._in_flight.popleft().rows
        outputs = []
        for number, ((sequence, _, _, wants_token), token_id) in enumerate(zip(rows, tokens.tolist(), strict=False)):
            if sequence.ended:
                continue
            scored = scores.get(number, NO_ROW_SCORES) if scores else NO_ROW_SCORES
            if scored.prompt:
                sequence.prompt_scores += scored.prompt
            if wants_token:
                outputs.append(self._add_token(sequence, token_id, scored.own, now=now))
        return outputs

    def take_events(self) -> Events:
        """Resume points that came and went since the last call."""
        return self.prefix.take_events()

    def load(self) -> Load:
        """What the scheduler knows of the load; the engine adds what it measures."""
        in_flight = (
            max(0, min(row.start + row.num_tokens, row.sequence.num_prompt) - row.start)
            for step in self._in_flight
            for row in step.chunks
            if not row.sequence.ended
        )
        not_launched = (sequence.num_uncomputed_prompt for sequence in chain(self._waiting, self._prefilling))
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            queued_tokens=sum(not_launched) + sum(in_flight),
            free_pages=self.pool.num_free,
            reusable_pages=self.pool.num_reusable,
            total_pages=self.pool.num_total,
            num_preemptions=self._num_preemptions,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
        )

    def _must_commit_first(self) -> bool:
        """Whether a row would be in the step whose last token the host has to know."""
        return any(sequence.num_tokens > len(sequence.token_ids) for sequence in self._needing_host)

    def _decode_rows(self) -> list[Row]:
        rows, page_size = [], self._config.page_size
        # The last in rank is preempted first, so nobody loses a row that is already in the list.
        for sequence in self._running.copy():
            start, num_tokens = sequence.num_computed, sequence.num_tokens
            if num_tokens - start != 1 or num_tokens == sequence.max_num_tokens or sequence.slot < 0:
                continue  # it prefills, or all it may have is on its way, or it was just preempted
            if start < len(sequence.pages) * page_size or self._find_page(sequence):
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
        self._release(sequence)
        self._waiting.add(sequence)
        self._num_preemptions += 1

    def _chunks(self, budget: int) -> list[Row]:
        """The next part of each prompt, first admitted first, as far as the budget goes."""
        chunks = []
        for sequence in self._prefilling:
            num_tokens = min(sequence.num_uncomputed, self._config.max_prefill_chunk_tokens, budget)
            if num_tokens:
                wants_token = num_tokens == sequence.num_uncomputed
                chunks.append(Row(sequence, sequence.num_computed, num_tokens, wants_token))
                budget -= num_tokens
        return chunks

    def _admit(self, budget: int, *, tokens_per_s: float) -> None:
        """Gives places and pages to those who wait, as long as the step has tokens left for them.

        One that does not fit holds up all behind it, so that nobody is passed over for being large. One whose next page
        is just being computed for another waits for that page, and holds up nobody.
        """
        if not self._waiting:
            return
        limit, page_size = self._config.max_prefill_chunk_tokens, self._config.page_size
        for sequence in self._waiting.candidates(self.prefix, page_size=page_size, tokens_per_s=tokens_per_s):
            before = (one for one in self._prefilling if one.rank[0] <= sequence.rank[0])
            if sum(min(one.num_uncomputed, limit) for one in before) >= budget:
                return
            if self._is_next_page_coming(sequence):
                continue
            if not self._start(sequence):
                return

    def _is_next_page_coming(self, sequence: Sequence) -> bool:
        """Whether a running prefill is about to compute the first page that the cache does not have."""
        num_usable = sequence.num_usable_pages
        depth = self.prefix.depth(sequence.chain, sequence.token_ids, num_pages=num_usable)
        if depth == num_usable:
            return False
        digest = sequence.chain.digest(sequence.token_ids, depth)
        return any(
            depth < len(one.token_ids) // self._config.page_size and one.chain.digest(one.token_ids, depth) == digest
            for one in self._prefilling
        )

    def _start(self, sequence: Sequence) -> bool:
        """Gives a place, and pages for all its tokens; False if there are none, even by preempting lower priorities."""
        page_size, num_tokens = self._config.page_size, len(sequence.token_ids)
        assert sequence.num_tokens == num_tokens, "a token of a waiting sequence is still on its way"
        digests = sequence.chain.digests(sequence.token_ids, num_pages=sequence.num_usable_pages)
        cached = self.prefix.match(digests)
        num_new = -(-num_tokens // page_size) - len(cached)
        while not self._has_room(cached, num_new):
            if not self._running or self._running[-1].rank[0] <= sequence.rank[0]:
                return False
            self._preempt(self._running[-1])
        for page in cached:
            self.pool.reference(page)
        sequence.pages = cached + [self.pool.allocate() for _ in range(num_new)]
        sequence.slot = self._table.take(sequence.pages, sequence.request.sampling)
        sequence.num_computed = len(cached) * page_size
        sequence.num_registered_pages = len(cached)
        sequence.register_at = sequence.num_computed + page_size
        if sequence.started_s is None:
            sequence.num_cached_tokens = sequence.num_computed
            self._queried_tokens += num_tokens
            self._hit_tokens += sequence.num_computed
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=by_rank)
        insort(self._prefilling, sequence, key=_by_priority)
        if sequence.needs_host:
            self._needing_host.append(sequence)
        return True

    def _has_room(self, cached: list[PageId], num_new: int) -> bool:
        """A place, pages, and one page more for each: who starts with the last pages is soon preempted."""
        num_available = self.pool.num_available - sum(self.pool.is_reusable(page) for page in cached)
        num_running = len(self._running)
        num_more = num_running + 1 if num_running else 0  # one alone has always room
        return num_running < self._config.max_running and num_new + num_more <= num_available

    def _count_launched(self, rows: list[Row], *, now: float) -> None:
        for index, (sequence, start, num_tokens, wants_token) in enumerate(rows):
            sequence.num_computed = num_computed = start + num_tokens
            if wants_token:
                sequence.num_tokens += 1
                sequence.row = index
            if sequence.started_s is None:
                sequence.started_s = now
            if num_computed >= sequence.register_at:
                self._register_pages(sequence)
        if self._prefilling:
            self._prefilling = [sequence for sequence in self._prefilling if sequence.num_uncomputed > 1]

    def _register_pages(self, sequence: Sequence) -> None:
        """Makes pages matchable whose tokens are all known here and computed by launched steps."""
        page_size = self._config.page_size
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // page_size
        for index in range(sequence.num_registered_pages, num_full):
            digest = sequence.chain.digest(sequence.token_ids, index)
            page = self.prefix.register(sequence.pages[index], digest, page_index=index)
            sequence.pages[index] = self._table.page_table[sequence.slot, index] = page
        sequence.num_registered_pages = num_full
        sequence.register_at = (num_full + 1) * page_size

    def _add_token(self, sequence: Sequence, token_id: int, score: TokenScore | None, *, now: float) -> SequenceOutput:
        sequence.token_ids.append(token_id)
        if sequence.processors is not None:
            sequence.processors.add(token_id)
        num_known, reason = len(sequence.token_ids), None
        if token_id in sequence.stop_token_ids:
            reason = FinishReason.STOP
        elif sequence.processors is not None and sequence.processors.finish_reason is not None:
            reason = sequence.processors.finish_reason
        elif num_known == sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence)
        elif num_known >= sequence.register_at:
            self._register_pages(sequence)
        request_id = sequence.request.request_id
        if num_known > sequence.num_prompt + 1:
            if score is None:
                return SequenceOutput(request_id, (token_id,), reason)
            return SequenceOutput(request_id, (token_id,), reason, scores=(score,))
        started_s = now if sequence.started_s is None else sequence.started_s
        return SequenceOutput(
            request_id,
            (token_id,),
            reason,
            num_cached_tokens=sequence.num_cached_tokens,
            queue_s=started_s - sequence.submitted_s,
            prefill_s=now - started_s,
            scores=() if score is None else (score,),
            prompt_scores=tuple(sequence.prompt_scores),
        )

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        del self._sequences[sequence.request.request_id]
        if sequence.is_running:
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Takes place and pages away."""
        self._running.remove(sequence)
        for some in (self._prefilling, self._needing_host):
            if sequence in some:
                some.remove(sequence)
        self._table.give_back(sequence.slot)
        self.pool.release(sequence.pages)
        sequence.slot = -1
        sequence.pages = []
        sequence.num_computed = 0


def _by_priority(sequence: Sequence) -> int:
    return sequence.rank[0]
