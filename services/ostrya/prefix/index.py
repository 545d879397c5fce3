"""Which replica holds which prefix: routing digest → bit mask of replicas. Pure: the tracker writes, a pick reads.

A slot is a replica's number here, for as long as its process lives; inside, it owns one bit of every mask. Forgetting a
slot's digests is clearing its bit in one `alive` mask; `sweep` takes the dead bit out of the table later, in bounded
slices, and only then is the bit given out again.

Bounded: at `max_entries` distinct digests a new digest is refused and counted. Parents are stored before children, so
what is refused is the deepest; its replica merely gets less credit until evictions make room and a snapshot comes.
Memory: 80 to 130 B a digest, however many replicas hold it. Time at 1 M digests: 0.15 to 0.35 µs a digest looked up
(memory latency is all of it), 0.3 µs stored.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Cleared, Event, Removed, Stored

# A prediction lives one to two generations: long enough for the first event to arrive, short enough to be forgotten
# when the request failed. Router research, 6.2 rule 5: 2-5 s.
_GENERATION_S = 2.0
_MAX_PREDICTED = 1 << 16
_MAX_KNOWN_MASKS = 1 << 16


class PrefixIndex:
    """Resume points of all replicas. A pick's `depths` is the only read on the request path."""

    def __init__(self, *, max_entries: int = 4_000_000) -> None:
        self._max_entries = max_entries
        self._masks: dict[RoutingDigest, int] = {}
        self._known_masks: dict[int, int] = {}
        self._alive = 0
        self._dead = 0
        self._bits: dict[int, int] = {}
        """Slot → its bit, as a mask."""
        self._slots: dict[int, int] = {}
        """Position of a bit → its slot."""
        self._counts: dict[int, int] = {}
        self._next_slot = 0
        self._sweep_keys: list[RoutingDigest] = []
        self._sweep_bits = 0
        self._recent: dict[RoutingDigest, int] = {}
        self._older: dict[RoutingDigest, int] = {}
        self._rotated_at = float("-inf")
        self.num_refused = 0
        """Digests not admitted because the index was full, since the start."""

    @property
    def num_entries(self) -> int:
        """Distinct digests, those of dead slots included until they are swept."""
        return len(self._masks)

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
        return {digest for digest, mask in self._masks.items() if mask & bit}

    def add_slot(self) -> int:
        """A slot for one more replica process, empty. Slot numbers are never used twice."""
        slot = self._next_slot
        self._next_slot += 1
        self._give_bit(slot)
        return slot

    def retire(self, slot: int) -> None:
        """The replica is gone: its credit ends now, its digests with the next sweep. Unknown slots are ignored."""
        if slot in self._bits:
            self._take_bit(slot)
            del self._counts[slot]

    def apply(self, slot: int, events: Iterable[Event]) -> None:
        """Journal events in order. KeyError if the slot is not alive."""
        for event in events:
            if isinstance(event, Stored):
                self._store(slot, event.digests)
            elif isinstance(event, Removed):
                self._remove(slot, event.digests)
            elif isinstance(event, Cleared):
                self.replace(slot, ())

    def replace(self, slot: int, digests: Iterable[RoutingDigest]) -> None:
        """The slot holds exactly these. Costs as much as storing them, whatever was there before."""
        self._take_bit(slot)
        self._give_bit(slot)
        self._store(slot, digests)

    def depths(self, digests: Sequence[RoutingDigest]) -> dict[int, int]:
        """For each alive slot that could reuse any of it: leading routing blocks of the chain `digests` it has.

        That is the index of the deepest digest it published, plus one: true for models that publish every block and
        for hybrid ones that publish only where a recurrent state was kept.
        """
        found = self._scan(self._masks, digests)
        for predicted in (self._recent, self._older):
            if predicted:
                for slot, depth in self._scan(predicted, digests).items():
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
        """Takes dead bits out of up to `budget` digests; True when none is left. The first slice copies the keys."""
        if not self._dead:
            return True
        if not self._sweep_bits:
            self._sweep_keys, self._sweep_bits = list(self._masks), self._dead
        masks, keep = self._masks, ~self._sweep_bits
        for digest in islice(reversed(self._sweep_keys), budget):
            mask = masks.get(digest, 0)
            if mask & keep == mask:
                continue
            if mask & keep:
                masks[digest] = self._shared(mask & keep)
            else:
                del masks[digest]
        del self._sweep_keys[max(0, len(self._sweep_keys) - budget) :]
        if not self._sweep_keys:
            # A bit's next owner must not inherit predictions; they are guesses, so all may go.
            self._recent, self._older = {}, {}
            self._dead &= keep
            self._sweep_bits = 0
        return not self._dead

    def _scan(self, table: dict[RoutingDigest, int], digests: Sequence[RoutingDigest]) -> dict[int, int]:
        found: dict[int, int] = {}
        remaining, slots = self._alive, self._slots
        depth = len(digests)
        seen = None
        for mask in map(table.get, reversed(digests)):
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

    def _store(self, slot: int, digests: Iterable[RoutingDigest]) -> None:
        masks, bit, room = self._masks, self._bits[slot], self._max_entries - len(self._masks)
        added = 0
        for digest in digests:
            mask = masks.get(digest)
            if mask is None:
                if room <= 0:
                    self.num_refused += 1
                    continue
                room -= 1
                masks[digest] = bit
                added += 1
            elif not mask & bit:
                masks[digest] = self._shared(mask | bit)
                added += 1
        self._counts[slot] += added

    def _remove(self, slot: int, digests: Iterable[RoutingDigest]) -> None:
        masks, bit = self._masks, self._bits[slot]
        removed = 0
        for digest in digests:
            mask = masks.get(digest, 0)
            if mask & bit:
                removed += 1
                if mask == bit:
                    del masks[digest]
                else:
                    masks[digest] = self._shared(mask ^ bit)
        self._counts[slot] -= removed

    def _shared(self, mask: int) -> int:
        """The one object for this mask: saves 32 B a digest, and `_scan` skips runs of one mask by identity."""
        if len(self._known_masks) > _MAX_KNOWN_MASKS:
            self._known_masks.clear()
        return self._known_masks.setdefault(mask, mask)

    def _give_bit(self, slot: int) -> None:
        free = ~(self._alive | self._dead)
        bit = free & -free
        self._alive |= bit
        self._bits[slot] = bit
        self._slots[bit.bit_length()] = slot
        self._counts[slot] = 0

    def _take_bit(self, slot: int) -> None:
        bit = self._bits.pop(slot)
        del self._slots[bit.bit_length()]
        self._alive ^= bit
        self._dead |= bit

    def _rotate(self, now: float) -> None:
        self._older, self._recent = self._recent, {}
        self._rotated_at = now
