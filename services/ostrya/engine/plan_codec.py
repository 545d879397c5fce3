"""A StepPlan as bytes for the other ranks, and back. Pure numpy; used by replicas.py and follower.py.

The page table is nearly all of a plan and changes by a page now and then: both sides keep a mirror of the scheduler's
table, and only what differs from it is sent. That is exact because every plan arrives, once and in order. All else is
sent as it is, 11 kB for 256 rows.

A message: eight u32 (bucket, counts, sections), the sizes of what has no fixed size, then the arrays one after another,
each of 4-byte elements.
"""

import math
import struct
from collections.abc import Iterator

import numpy as np

from ostrya.engine.plan import F32, I32, Bucket, Entries, Mask, Processors, Scoring, StepPlan

_HEAD = struct.Struct("<8I")
_HAS_SLOTS, _HAS_PROCESSORS, _HAS_MASK, _HAS_SCORING = 1, 2, 4, 8
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "typical_p")
MAX_TOKENS, MAX_TABLE = 1 << 24, 1 << 28
"""Tokens of a step, and entries of a page table: what a damaged message may make us set aside."""


class _Mirror:
    """The scheduler's page table as far as plans have shown it; it grows with them."""

    def __init__(self) -> None:
        self.table = np.zeros((0, 0), np.int32)

    def cover(self, slots: I32, num_pages: int) -> None:
        num_slots, pages_per_row = self.table.shape
        needed = max(num_slots, int(slots.max(initial=-1)) + 1), max(pages_per_row, num_pages)
        if needed != self.table.shape:
            grown = np.zeros(needed, np.int32)
            grown[:num_slots, :pages_per_row] = self.table
            self.table = grown


class PlanEncoder:
    """Of one rank 0, for all its followers."""

    def __init__(self) -> None:
        self._mirror = _Mirror()

    def encode(self, plan: StepPlan) -> bytes:
        """The message. ValueError for a plan whose padding rows have pages."""
        flags, sizes = 0, list[int]()
        arrays: list[I32 | F32] = [plan.token_ids, plan.token_source, plan.positions, plan.slot_mapping]
        arrays += [plan.kv_lens, plan.logits_index, plan.top_k, plan.temperature, plan.top_p, plan.uniform]
        arrays += [plan.query_start, plan.wants_token.astype(np.int32)]
        if plan.page_table[plan.num_rows :].any():
            raise ValueError("padding rows of a plan have pages")
        if plan.slots is None:
            arrays.append(plan.page_table[: plan.num_rows])
        else:
            flags |= _HAS_SLOTS
            changed, pages = self._changes(plan, plan.slots)
            sizes.append(len(changed))
            arrays += [plan.slots, changed, pages]
        if (processors := plan.processors) is not None:
            flags |= _HAS_PROCESSORS
            sizes += [len(processors.bias.row), len(processors.seen.row)]
            arrays += [part for one in (processors.bias, processors.seen) for part in (one.row, one.token, one.value)]
            arrays += [getattr(processors, name) for name in _PENALTIES]
            if (mask := processors.mask) is not None:
                flags |= _HAS_MASK
                sizes += mask.words.shape
                arrays += [mask.row, mask.words]
        if (scoring := plan.scoring) is not None:
            flags |= _HAS_SCORING
            sizes += [len(scoring.row), len(scoring.index)]
            arrays += [scoring.row, scoring.index, scoring.target, scoring.num_top]
        bucket = plan.bucket
        head = (bucket.tokens, bucket.rows, bucket.pages, plan.num_tokens, plan.num_rows, plan.num_decode_rows)
        packed = _HEAD.pack(*head, flags, len(sizes)) + struct.pack(f"<{len(sizes)}I", *sizes)
        return b"".join([packed, *(np.ascontiguousarray(array).data for array in arrays)])

    def _changes(self, plan: StepPlan, slots: I32) -> tuple[I32, I32]:
        """Where, counted through the plan's rows, and to what."""
        num_pages = plan.bucket.pages
        self._mirror.cover(slots, num_pages)
        now = plan.page_table[: plan.num_rows]
        changed = np.flatnonzero(now != self._mirror.table[slots, :num_pages]).astype(np.int32)
        pages = now.ravel()[changed]
        self._mirror.table[slots[changed // num_pages], changed % num_pages] = pages
        return changed, pages


class _Reader:
    """Takes arrays off a message; they share its memory, which must be writable, as backends may want them so."""

    def __init__(self, message: bytearray, offset: int) -> None:
        self._message, self._offset = message, offset

    def ints(self, *shape: int) -> I32:
        count = math.prod(shape)
        if self._offset + 4 * count > len(self._message):
            raise ValueError(f"a plan of {len(self._message)} bytes is cut short")
        array = np.frombuffer(self._message, np.int32, count, self._offset).reshape(shape)
        self._offset += 4 * count
        return array

    def floats(self, *shape: int) -> F32:
        return self.ints(*shape).view(np.float32)

    def entries(self, size: int) -> Entries:
        return Entries(row=self.ints(size), token=self.ints(size), value=self.floats(size))

    def end(self) -> None:
        if self._offset != len(self._message):
            raise ValueError(f"a plan of {len(self._message)} bytes should have {self._offset}")


class PlanDecoder:
    """Of one follower; give it every message of one encoder, in order."""

    def __init__(self) -> None:
        self._mirror = _Mirror()

    def decode(self, message: bytearray) -> StepPlan:
        """The plan, whose arrays keep `message`. ValueError if it is none."""
        try:
            return self._decode(message)
        except (struct.error, StopIteration) as error:
            raise ValueError(f"a plan of {len(message)} bytes is cut short") from error

    def _decode(self, message: bytearray) -> StepPlan:
        tokens, rows, pages, num_tokens, num_rows, num_decode_rows, flags, num_sizes = _HEAD.unpack_from(message)
        sizes = iter(struct.unpack_from(f"<{num_sizes}I", message, _HEAD.size))
        is_small = max(tokens, rows) <= MAX_TOKENS and rows * pages <= MAX_TABLE
        if not is_small or num_tokens > tokens or num_rows > rows:
            raise ValueError(f"a plan says that it has {num_tokens} of {tokens} tokens and {num_rows} of {rows} rows")
        reader = _Reader(message, _HEAD.size + 4 * num_sizes)
        by_token, by_row = [reader.ints(tokens) for _ in range(4)], [reader.ints(rows) for _ in range(3)]
        by_row_f = [reader.floats(rows) for _ in range(3)]
        query_start, wants_token = reader.ints(rows + 1), reader.ints(rows).astype(np.bool_)
        page_table = np.zeros((rows, pages), np.int32)
        slots = None
        if flags & _HAS_SLOTS:
            slots = reader.ints(num_rows)
            num_changes = next(sizes)
            self._apply(page_table[:num_rows], slots, changed=reader.ints(num_changes), pages=reader.ints(num_changes))
        else:
            page_table[:num_rows] = reader.ints(num_rows, pages)
        plan = StepPlan(
            bucket=Bucket(tokens, rows, pages),
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode_rows=num_decode_rows,
            token_ids=by_token[0],
            token_source=by_token[1],
            positions=by_token[2],
            slot_mapping=by_token[3],
            kv_lens=by_row[0],
            logits_index=by_row[1],
            top_k=by_row[2],
            temperature=by_row_f[0],
            top_p=by_row_f[1],
            uniform=by_row_f[2],
            query_start=query_start,
            wants_token=wants_token,
            page_table=page_table,
            processors=_processors(reader, sizes, flags, rows=rows) if flags & _HAS_PROCESSORS else None,
            scoring=_scoring(reader, sizes) if flags & _HAS_SCORING else None,
            slots=slots,
        )
        reader.end()
        return plan

    def _apply(self, rows_RP: I32, slots: I32, *, changed: I32, pages: I32) -> None:
        num_pages = rows_RP.shape[1]
        if slots.min(initial=0) < 0 or (int(slots.max(initial=0)) + 1) * num_pages > MAX_TABLE:
            raise ValueError("a plan names a slot that no table has")
        if changed.min(initial=0) < 0 or changed.max(initial=-1) >= rows_RP.size:
            raise ValueError("a plan changes pages of rows that it does not have")
        self._mirror.cover(slots, num_pages)
        self._mirror.table[slots[changed // max(1, num_pages)], changed % max(1, num_pages)] = pages
        rows_RP[:] = self._mirror.table[slots, :num_pages]


def _processors(reader: _Reader, sizes: Iterator[int], flags: int, *, rows: int) -> Processors:
    bias, seen = reader.entries(next(sizes)), reader.entries(next(sizes))
    penalties = {name: reader.floats(rows) for name in _PENALTIES}
    mask = None
    if flags & _HAS_MASK:
        num_masks, num_words = next(sizes), next(sizes)
        mask = Mask(row=reader.ints(num_masks), words=reader.ints(num_masks, num_words))
    return Processors(bias=bias, seen=seen, mask=mask, **penalties)


def _scoring(reader: _Reader, sizes: Iterator[int]) -> Scoring:
    num_rows, num_prompt = next(sizes), next(sizes)
    return Scoring(
        row=reader.ints(num_rows),
        index=reader.ints(num_prompt),
        target=reader.ints(num_prompt),
        num_top=reader.ints(num_rows + num_prompt),
    )


def chosen(tokens: I32, plan: StepPlan) -> bytes:
    """Those of a step's tokens that somebody wants: on every rank the same."""
    return tokens[: plan.num_rows][plan.wants_token[: plan.num_rows]].astype(np.int32).tobytes()
