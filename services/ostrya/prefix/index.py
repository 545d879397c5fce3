"""Which replica holds which prefix: routing digest → bit mask of replicas. Pure: the tracker writes, a pick reads.

A slot is a replica's number here, for as long as its process lives; inside, it owns one bit of every mask. Forgetting a
slot's digests is clearing its bit in one `alive` mask; `sweep` takes the dead bit out of the table later, in bounded
slices, and only then is the bit given out again.

Bounded: at `max_entries` distinct digests a new digest is refused and counted. Parents are stored before children, so
what is refused is the deepest; its replica merely gets less credit until evictions make room and a snapshot comes.
Memory: 80 to 130 B a digest, however many replicas hold it. Time at 1 M digests: 0.2 to 0.4 µs a digest looked up
(most of it memory latency), 0.5 µs stored, and never more than some milliseconds at a stretch, however it grows.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Cleared, Event, Removed, Stored

# A prediction lives one to two generations: long enough for the first event to arrive, short enough to be forgotten
# when the request failed. Router research, 6.2 rule 5: 2-5 s.
_GENERATION_S = 2.0
_MAX_PREDICTED = 1 << 16
_MAX_KNOWN_MASKS = 1 << 16
# A dict that grows moves all it has, 100 ms with millions of digests, and several times as long where other programs
# keep the machine busy. A shard of 4 M / 2,048 is lost in the time of a slice. Shards have different shares of the
# digests, one to two, so that they do not all grow at the same moment.
_SHARDS = 2_048
_BUCKETS = 32_768
_LAST = _BUCKETS - 1

Table = dict[RoutingDigest, int]


class PrefixIndex:
    """Resume points of all replicas. A pick's `depths` is the only read on the request path."""

    def __init__(self, *, max_entries: int = 4_000_000) -> None:
        self.max_entries = max_entries
        """Distinct digests that it takes."""
        self._shards: list[Table] = [{} for _ in range(_SHARDS)]
        self._buckets = _shared_out(self._shards)
        """The last bits of a digest → the shard that has its mask."""
        self._num_entries = 0
        self._known_masks: dict[int, int] = {}
        self._alive = 0
        self._drafts = 0
        self._dead = 0
        self._bits: dict[int, int] = {}
        """Slot → its bit, as a mask."""
        self._slots: dict[int, int] = {}
        """Position of a bit → its slot."""
        self._counts: dict[int, int] = {}
        self._next_slot = 0
        self._sweep_keys: list[RoutingDigest] = []
        self._sweep_next = 0
        """The shard to be swept after these keys."""
        self._sweep_bits = 0
        self._recent: dict[RoutingDigest, int] = {}
        self._older: dict[RoutingDigest, int] = {}
        self._rotated_at = float("-inf")
        self.num_refused = 0
        """Digests not admitted because the index was full, since the start."""

    @property
    def num_entries(self) -> int:
        """Distinct digests, those of dead slots included until they are swept."""
        return self._num_entries

    @property
    def num_predicted(self) -> int:
        """Predictions held, those of dead slots included."""
        return len(self._recent) + len(self._older)

    @property
    def is_swept(self) -> bool:
        """Nothing is left to sweep."""
        return not self._dead

    def num_blocks(self, slot: int) -> int:
        """Resume points of one slot; 0 if the slot is not alive."""
        return self._counts.get(slot, 0)

    def holds(self, slot: int) -> set[RoutingDigest]:
        """Every resume point of one slot. Reads the whole index: for tests and tools."""
        bit = self._bits.get(slot, 0)
        return {digest for shard in self._shards for digest, mask in shard.items() if mask & bit}

    def add_slot(self) -> int:
        """A slot for one more replica process, empty. Slot numbers are never used twice."""
        slot = self._next_slot
        self._next_slot += 1
        self._give_bit(slot)
        return slot

    def add_draft(self) -> int:
        """A slot that no look-up sees, to be filled in slices; it becomes another one's new content, or is retired."""
        slot = self._next_slot
        self._next_slot += 1
        self._give_bit(slot)
        self._alive ^= self._bits[slot]
        self._drafts |= self._bits[slot]
        return slot

    def become(self, slot: int, draft: int) -> None:
        """The slot holds what the draft does, at once; the draft is no more. KeyError if either is unknown."""
        self._take_bit(slot)
        bit, self._counts[slot] = self._bits.pop(draft), self._counts.pop(draft)
        self._drafts ^= bit
        self._alive |= bit
        self._bits[slot] = bit
        self._slots[bit.bit_length()] = slot

    def retire(self, slot: int) -> None:
        """The replica is gone: its credit ends now, its digests with the next sweep. Unknown slots are ignored."""
        if slot in self._bits:
            self._take_bit(slot)
            del self._counts[slot]

    def apply(self, slot: int, events: Iterable[Event]) -> None:
        """Journal events in order. KeyError if the slot is not alive."""
        for event in events:
            if isinstance(event, Stored):
                self.store(slot, event.digests)
            elif isinstance(event, Removed):
                self._remove(slot, event.digests)
            elif isinstance(event, Cleared):
                self.replace(slot, ())

    def store(self, slot: int, digests: Iterable[RoutingDigest]) -> None:
        """It holds these too. KeyError if the slot is neither alive nor a draft."""
        buckets, bit, room = self._buckets, self._bits[slot], self.max_entries - self._num_entries
        first_room, added = room, 0
        for digest in digests:
            shard = buckets[digest & _LAST]
            mask = shard.get(digest)
            if mask is None:
                if room <= 0:
                    self.num_refused += 1
                    continue
                room -= 1
                shard[digest] = bit
                added += 1
            elif not mask & bit:
                shard[digest] = self._shared(mask | bit)
                added += 1
        self._num_entries += first_room - room
        self._counts[slot] += added

    def replace(self, slot: int, digests: Iterable[RoutingDigest]) -> None:
        """The slot holds exactly these. Costs as much as storing them, whatever was there before."""
        if self._counts[slot]:
            self._take_bit(slot)
            self._give_bit(slot)
        self.store(slot, digests)

    def depths(self, digests: Sequence[RoutingDigest]) -> dict[int, int]:
        """For each alive slot that could reuse any of it: leading routing blocks of the chain `digests` it has.

        That is the index of the deepest digest it published, plus one: true for models that publish every block and
        for hybrid ones that publish only where a recurrent state was kept.
        """
        deepest_first, buckets = digests[::-1], self._buckets
        shards = [buckets[digest & _LAST] for digest in deepest_first]
        found = self._scan(map(dict.get, shards, deepest_first), len(digests))
        for predicted in (self._recent, self._older):
            if predicted:
                for slot, depth in self._scan(map(predicted.get, deepest_first), len(digests)).items():
                    if depth > found.get(slot, 0):
                        found[slot] = depth
        return found

    def predict(self, slot: int, digests: Iterable[RoutingDigest], now: float) -> None:
        """A request with these digests was just sent there: siblings may count on it for 2 to 4 seconds.

        Only the part beyond what the slot is known to have needs to be passed.
        """
        self.expire(now)
        bit = self._bits.get(slot)
        if bit is None:
            return
        recent = self._recent
        for digest in digests:
            recent[digest] = recent.get(digest, 0) | bit
        if len(recent) > _MAX_PREDICTED:
            self._rotate(now)

    def expire(self, now: float) -> None:
        """Forgets predictions whose time is over. Cheap; predict does it too."""
        if now - self._rotated_at >= _GENERATION_S:
            if now - self._rotated_at >= 2 * _GENERATION_S:
                self._recent = {}
            self._rotate(now)

    def sweep(self, budget: int) -> bool:
        """Takes dead bits out of up to `budget` digests; True when none is left."""
        if not self._dead:
            return True
        if not self._sweep_bits:
            self._sweep_next, self._sweep_bits = 0, self._dead
        keep = ~self._sweep_bits
        while budget > 0 and (self._sweep_keys or self._sweep_next < _SHARDS):
            if not self._sweep_keys:
                self._sweep_keys = list(self._shards[self._sweep_next])
                self._sweep_next += 1
            part = self._sweep_keys[-budget:]
            del self._sweep_keys[-budget:]
            budget -= len(part)
            self._take_out(part, self._shards[self._sweep_next - 1], keep)
        if not self._sweep_keys and self._sweep_next == _SHARDS:
            # A bit's next owner must not inherit predictions; they are guesses, so all may go.
            self._recent, self._older = {}, {}
            self._dead &= keep
            self._sweep_bits = 0
        return not self._dead

    def _take_out(self, digests: list[RoutingDigest], shard: Table, keep: int) -> None:
        for digest in digests:
            mask = shard.get(digest, 0)
            if mask & keep == mask:
                continue
            if mask & keep:
                shard[digest] = self._shared(mask & keep)
            else:
                del shard[digest]
                self._num_entries -= 1

    def _scan(self, masks: Iterable[int | None], depth: int) -> dict[int, int]:
        """`masks` are those of a chain of `depth` digests, the deepest first."""
        found: dict[int, int] = {}
        remaining, slots = self._alive, self._slots
        seen = None
        for mask in masks:
            if mask is not seen and mask is not None:
                seen = mask
                new = mask & remaining
                remaining ^= new
                while new:
                    bit = new & -new
                    found[slots[bit.bit_length()]] = depth
                    new ^= bit
                if not remaining:
                    break
            depth -= 1
        return found

    def _remove(self, slot: int, digests: Iterable[RoutingDigest]) -> None:
        buckets, bit = self._buckets, self._bits[slot]
        removed = 0
        for digest in digests:
            shard = buckets[digest & _LAST]
            mask = shard.get(digest, 0)
            if mask & bit:
                removed += 1
                if mask == bit:
                    del shard[digest]
                    self._num_entries -= 1
                else:
                    shard[digest] = self._shared(mask ^ bit)
        self._counts[slot] -= removed

    def _shared(self, mask: int) -> int:
        """The one object for this mask: saves 32 B a digest, and `_scan` skips runs of one mask by identity."""
        if len(self._known_masks) > _MAX_KNOWN_MASKS:
            self._known_masks.clear()
        return self._known_masks.setdefault(mask, mask)

    def _give_bit(self, slot: int) -> None:
        free = ~(self._alive | self._drafts | self._dead)
        bit = free & -free
        self._alive |= bit
        self._bits[slot] = bit
        self._slots[bit.bit_length()] = slot
        self._counts[slot] = 0

    def _take_bit(self, slot: int) -> None:
        bit = self._bits.pop(slot)
        del self._slots[bit.bit_length()]
        self._alive &= ~bit
        self._drafts &= ~bit
        self._dead |= bit

    def _rotate(self, now: float) -> None:
        self._older, self._recent = self._recent, {}
        self._rotated_at = now


def _shared_out(shards: Sequence[Table]) -> list[Table]:
    """A shard for each bucket: the last one has twice as many as the first."""
    ends = list(accumulate(2 ** (number / len(shards)) for number in range(len(shards))))
    buckets: list[Table] = []
    for shard, end in zip(shards, ends, strict=True):
        buckets += [shard] * (round(end * _BUCKETS / ends[-1]) - len(buckets))
    return buckets
