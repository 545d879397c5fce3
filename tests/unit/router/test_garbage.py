"""Registry, discovery and tracker at work while everything in Redis is damaged: they go on, and so do decisions."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import cast

import grpc
import msgspec
import pytest

from ostrya.errors import Unreadable
from ostrya.prefix.chain import ChainKey, RoutingDigest
from ostrya.prefix.events import SLICE, Stored, pack
from ostrya.prefix.index import PrefixIndex
from ostrya.router import admin, pick
from ostrya.router.discovery import Discovery
from ostrya.router.fleet import Fleet
from ostrya.router.settings import RouterSettings
from ostrya.router.tracker import _SLICES, Tracker
from ostrya.router.types import ReplicaState, WorkerId
from ostrya.state import snapshot
from ostrya.state.board import LoadRow
from ostrya.state.connection import Command, Connection
from ostrya.state.rows import MAX_ROWS, Kind, Rejects
from tests.fakes import garbage
from tests.fakes.pool import member, replica

WORKERS = ("w0", "w1", "w2")
DIGESTS = [RoutingDigest(number) for number in range(1, 30)]
Answer = Unreadable | bytes


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Garbled:
    """What Redis holds, as a Connection shows it: no commands are executed, nothing is ever healed by itself."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[bytes, bytes]] = {"members": {}, "load": {}}
        self.wrong: set[str] = set()
        """Keys, by their last part and worker, under which another type stands."""
        self.meta: dict[str, list[bytes | None]] = {}
        self.journal: dict[str, list[tuple[bytes, dict[bytes, bytes]]]] = {}
        self.snapshot: dict[str, bytes] = {}
        self.epoch = 1_000
        self.num_ranges = 0
        """Parts of snapshots that were fetched."""
        self.renew()

    def renew(self) -> None:
        """Every worker registers again and writes everything anew."""
        self.epoch += 1
        self.wrong.clear()
        self.tables = {"members": {}, "load": {}}
        for worker_id in WORKERS:
            self.meta[worker_id] = [str(self.epoch).encode(), b"2", b"1"]
            self.journal[worker_id] = [(f"{self.epoch}-2".encode(), {b"b": pack([Stored(tuple(DIGESTS[20:]))])})]
            self.snapshot[worker_id] = snapshot.pack(self.epoch, 1, DIGESTS[:20])
            self.write_rows(worker_id)

    def write_rows(self, worker_id: str) -> None:
        row = msgspec.structs.replace(member(worker_id, f"127.0.0.1:{1 + WORKERS.index(worker_id)}"), epoch=self.epoch)
        self.tables["members"][worker_id.encode()] = msgspec.msgpack.encode(row)
        self.tables["load"][worker_id.encode()] = msgspec.msgpack.encode(LoadRow(stamp=self.epoch, num_running=1))

    def damage(self, rng: random.Random) -> None:
        """One key, in one way."""
        worker_id = rng.choice(WORKERS)
        match rng.randrange(9):
            case 0 | 1:
                table = self.tables["members"]
                table[worker_id.encode()] = garbage.mutated(rng, table.get(worker_id.encode(), b""))
            case 2 | 3:
                table = self.tables["load"]
                table[worker_id.encode()] = garbage.mutated(rng, table.get(worker_id.encode(), b""))
            case 4:
                fields = (b"\xff\xfe", b"", b"w0\n", b"w" * 300, rng.randbytes(6))
                self.tables[rng.choice(("members", "load"))][rng.choice(fields)] = rng.randbytes(8)
            case 5:
                self.meta[worker_id][rng.randrange(3)] = rng.choice((None, garbage.integer(rng)))
            case 6:
                seq = rng.choice((2, 3, 4, 9, 2**64 - 1))
                epoch = rng.choice((self.epoch, self.epoch, self.epoch + 1, 2**64 - 1))
                fields = {rng.choice((b"b", b"b", b"s", b"\xff")): garbage.batch(rng)}  # type: ignore[assignment]
                self.journal[worker_id].append((f"{epoch}-{seq}".encode(), fields))  # type: ignore[arg-type]
            case 7:
                self.snapshot[worker_id] = garbage.mutated(rng, self.snapshot[worker_id])
            case 8:
                part = rng.choice(("meta", "journal", "snapshot"))
                self.wrong ^= {rng.choice((f"{part} {worker_id}", "load"))}

    # -- what a Connection can do --------------------------------------------------------------------------------

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[str | int | bytes]) -> object:
        if name == "forget":
            return 0
        assert name == "rows"
        table = keys[0].rpartition(":")[2]
        if table in self.wrong:
            raise Unreadable("WRONGTYPE")
        longest_field, longest = int(arguments[0]), int(arguments[1])
        flat: list[bytes] = []
        too_long: list[bytes] = []
        for field, value in self.tables[table].items():
            if len(field) > longest_field or len(value) > longest:
                too_long.append(field[:longest_field])
            else:
                flat += (field, value)
        return [flat, too_long, b"0"]

    async def all(self, commands: Iterable[Command]) -> list[object]:
        return [self._reply(*command) for command in commands]

    async def call(self, *command: str | int | bytes) -> object:
        if command[0] == "PING":
            return b"PONG"
        assert command[0] == "XREAD"
        streams = cast("tuple[str, ...]", command[6:])
        found = []
        for key, place in zip(streams[: len(streams) // 2], streams[len(streams) // 2 :], strict=True):
            worker_id = _worker(key)
            if f"journal {worker_id}" in self.wrong:
                raise Unreadable("WRONGTYPE")
            after = _place(place.encode())
            assert max(after) < 2**64, "Redis refuses such an id, and with it the whole read"
            entries = sorted((entry for entry in self.journal[worker_id]), key=lambda entry: _place(entry[0]))
            entries = [entry for entry in entries if _place(entry[0]) > after][:16]
            if entries:
                found.append((key.encode(), entries))
        return found or None

    def _reply(self, name: str | int | bytes, *arguments: str | int | bytes) -> object:
        worker_id = _worker(str(arguments[0]))
        part = {"HMGET": "meta", "STRLEN": "snapshot", "GETRANGE": "snapshot"}.get(str(name), "")
        if f"{part} {worker_id}" in self.wrong:
            return Unreadable("WRONGTYPE")
        match name:
            case "PTTL":
                return 2_500
            case "HMGET":
                return self.meta.get(worker_id, [None] * 3)
            case "TYPE":
                return b"string" if f"journal {worker_id}" in self.wrong else b"stream"
            case "STRLEN":
                return len(self.snapshot.get(worker_id, b""))
            case "GETRANGE":
                self.num_ranges += 1
                return self.snapshot.get(worker_id, b"")[int(arguments[1]) : int(arguments[2]) + 1]
        raise AssertionError(name)


def _worker(key: str) -> str:
    return key.partition("/")[2].partition("}")[0]


def _place(raw: bytes) -> tuple[int, int]:
    epoch, _, seq = raw.partition(b"-")
    return int(epoch), int(seq)


class Live:
    """The parts of a router that read Redis, over a garbled one, with three replicas that serve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ostrya.router.discovery.Link", IdleLink)
        for name in ("_BLOCK_MS", "_HEAL_MS"):  # where there is no journal to wait at, the tracker sleeps
            monkeypatch.setattr(f"ostrya.router.tracker.{name}", 0)
        self.redis, self.clock, self.rejects = Garbled(), Clock(), Rejects()
        self.index = PrefixIndex(max_entries=10_000)
        self.fleet = Fleet(index=self.index, clock=self.clock)
        settings = RouterSettings(redis_url="redis://127.0.0.1:1/0")
        chain = ChainKey(model="tiny", tokenizer_fingerprint="x")
        self.discovery = Discovery(settings, fleet=self.fleet, chain=chain, clock=self.clock, rejects=self.rejects)
        self.tracker = Tracker(settings, fleet=self.fleet, index=self.index, clock=self.clock, rejects=self.rejects)
        garbled = cast("Connection", self.redis)
        self.discovery._registry._connection = garbled
        self.tracker._connection = self.tracker._reader._connection = garbled

    def add_replicas(self, *, num_pages: int = 100) -> None:
        for number, worker_id in enumerate(WORKERS, 1):
            address = f"127.0.0.1:{number}"
            info = replica(worker_id, address, epoch=self.redis.epoch, num_pages=num_pages)
            self.fleet.add(info, grpc.aio.insecure_channel(address))
            self.fleet.set_state(WorkerId(worker_id), ReplicaState.READY)

    async def turn(self) -> None:
        """What the parts do in a quarter of a second."""
        self.clock.now += 0.25
        await self.discovery._registry.poll()
        self.fleet.set_holds(self.discovery._holds())
        await self.discovery._remove_gone()
        await self.discovery._match_links()
        self.index.expire(self.clock())
        self.index.sweep(1_000)
        self.tracker._match_fleet()
        await self.tracker._turn()

    def decide(self, rng: random.Random) -> None:
        """One request's decision, and what operators see."""
        seen = self.fleet.snapshot()
        assert len(seen.replicas) == len(WORKERS)
        chain = DIGESTS[: rng.randrange(len(DIGESTS))]
        depths = self.index.depths(chain)
        choice = pick.choose(seen, depths, num_tokens=500, first_digest=DIGESTS[0], seed=rng.getrandbits(64))
        assert choice is not None
        assert choice.worker_id in WORKERS
        assert all(admin._replica(row).SerializeToString() for row in self.fleet.replicas())

    def is_whole(self) -> bool:
        followed = self.fleet.followed()
        return all(self.index.holds(followed[WorkerId(one)].slot) == set(DIGESTS) for one in WORKERS)


class IdleLink:
    """In the place of a Link: dials nobody."""

    def __init__(self, **_: object) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
async def live(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Live]:
    made = Live(monkeypatch)
    made.add_replicas()
    yield made
    await made.discovery._end(list(made.discovery._links))
    await made.fleet.close()


async def test_no_mutation_of_any_key_ends_a_part_or_keeps_a_request_from_a_replica(live: Live) -> None:
    rng = random.Random(3)
    for number in range(garbage.num_mutations(4_000)):
        live.redis.damage(rng)
        if number % 4 < len(WORKERS):  # a worker writes its rows every second
            live.redis.write_rows(WORKERS[number % 4])
        if number % 40 == 39:  # and after a while it has registered again
            live.redis.renew()
        await live.turn()
        live.decide(rng)
    assert {kind for kind in live.rejects.counts if live.rejects.counts[kind]} >= {
        *(Kind.MEMBER, Kind.LOAD, Kind.HEAD, Kind.BATCH, Kind.SNAPSHOT)
    }
    live.redis.renew()
    for _ in range(100):  # 25 s
        await live.turn()
    assert live.is_whole(), (live.tracker._cursors, live.fleet.followed(), live.redis.epoch, live.index.num_refused)
    assert set(live.tracker.staleness_s().values()) == {0.0}, str(live.tracker._cursors.values())


@pytest.mark.parametrize(
    ("wild", "whole"),
    [(math.nan, 0), (math.inf, 2**64 - 1), (-math.inf, -(2**63)), (-1.0, -1), (2.0**63, 2**63), (5e-324, 1)],
)
async def test_load_rows_with_impossible_numbers_fail_no_decision_and_no_list(
    live: Live, wild: float, whole: int
) -> None:
    for worker_id in WORKERS:
        row = LoadRow(
            stamp=7,
            num_running=whole,
            num_waiting=whole,
            queued_tokens=whole,
            free_pages=whole,
            total_pages=whole,
            prefill_tokens_per_s=wild,
            queried_tokens=whole,
        )
        live.redis.tables["load"][worker_id.encode()] = msgspec.msgpack.encode(row)
    await live.turn()
    assert live.fleet.replicas()[0].load_age_s == 0, "they were read"
    live.decide(random.Random(1))


async def test_one_journal_of_another_type_hurts_no_other(live: Live) -> None:
    live.redis.wrong |= {"journal w0", "meta w1"}
    live.redis.journal["w2"].append((f"{live.redis.epoch}-3".encode(), {b"b": pack([Stored((RoutingDigest(99),))])}))
    live.redis.meta["w2"][1] = b"3"
    for _ in range(8):
        await live.turn()
    assert RoutingDigest(99) in live.index.holds(live.fleet.followed()[WorkerId("w2")].slot)
    assert live.rejects.counts[Kind.BATCH] >= 1
    assert live.rejects.counts[Kind.HEAD] >= 1


async def test_a_row_that_cannot_be_read_counts_as_unchanged(live: Live) -> None:
    await live.turn()
    live.redis.tables["members"][b"w0"] = b"\xff"
    for _ in range(60):  # 15 s: longer than any grace
        await live.turn()
    assert len(live.fleet.snapshot().replicas) == len(WORKERS)
    assert live.discovery._registry.num_over == 0


async def test_a_stray_epoch_is_not_believed(live: Live) -> None:
    await live.turn()
    stray = msgspec.structs.replace(member("w0", "127.0.0.1:1"), epoch=2**52)
    live.redis.tables["members"][b"w0"] = msgspec.msgpack.encode(stray)
    await live.turn()
    live.redis.write_rows("w0")
    live.redis.meta["w0"][0] = str(2**52).encode()
    for _ in range(4):
        await live.turn()
    assert live.fleet.followed()[WorkerId("w0")].min_epoch == live.redis.epoch
    live.redis.renew()
    for _ in range(60):
        await live.turn()
    assert live.is_whole()


async def test_a_stray_address_does_not_end_the_link_to_who_is_there(live: Live) -> None:
    for _ in range(3):
        await live.turn()
    assert set(live.discovery._links) == {"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}
    live.redis.tables["members"][b"w0"] = msgspec.msgpack.encode(member("w0", "10.9.9.9:7"))
    for _ in range(4):
        await live.turn()
    assert set(live.discovery._links) == {"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "10.9.9.9:7"}


async def test_of_five_thousand_members_a_bounded_number_is_taken_and_few_links_start_at_once(live: Live) -> None:
    for number in range(5_000):
        row = member(f"x{number}", f"10.0.{number // 250}.{number % 250}:7")
        live.redis.tables["members"][f"x{number}".encode()] = msgspec.msgpack.encode(row)
    await live.turn()
    assert len(live.discovery._links) <= 3 + 32
    for _ in range(3):
        await live.turn()
    assert len(live.discovery._registry.addresses) == MAX_ROWS
    assert len(live.discovery._links) <= 4 * 32
    assert live.rejects.counts[Kind.SURPLUS] > 0
    assert {"w0", "w1", "w2"} <= live.discovery._registry._known.keys()


async def test_a_snapshot_larger_than_its_worker_is_not_taken(live: Live) -> None:
    many = [RoutingDigest(number) for number in range(101)]
    live.redis.snapshot["w0"] = snapshot.pack(live.redis.epoch, 1, many)
    for _ in range(6):
        await live.turn()
    assert live.index.num_blocks(live.fleet.followed()[WorkerId("w0")].slot) == 0
    assert live.rejects.counts[Kind.SNAPSHOT] == 1
    assert live.redis.num_ranges == len(WORKERS), "its header is enough"


async def test_a_journal_that_stores_more_than_its_worker_can_hold_waits_for_a_snapshot(live: Live) -> None:
    many = pack([Stored(tuple(RoutingDigest(number) for number in range(1_000)))])
    live.redis.journal["w0"].append((f"{live.redis.epoch}-3".encode(), {b"b": many}))
    live.redis.meta["w0"][1] = b"3"
    for _ in range(6):
        await live.turn()
    assert live.rejects.counts[Kind.BATCH] >= 1
    assert live.tracker.staleness_s()[WorkerId("w0")] > 0


async def test_snapshots_and_batches_are_applied_in_slices_and_others_run_between_any_two(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, batch = 40_000, pack([Stored(tuple(map(RoutingDigest, range(10**6, 10**6 + 40_000))))])
    live.index.max_entries = 10 * num
    live.add_replicas(num_pages=2 * num)
    slices: list[tuple[int, int]] = []
    turns = 0
    store = PrefixIndex.store

    def counted(self: PrefixIndex, slot: int, digests: Sequence[RoutingDigest]) -> None:
        slices.append((turns, len(digests)))
        store(self, slot, digests)

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(PrefixIndex, "store", counted)
    live.redis.snapshot["w0"] = snapshot.pack(live.redis.epoch, 1, map(RoutingDigest, range(num)))
    live.redis.journal["w1"].append((f"{live.redis.epoch}-3".encode(), {b"b": batch}))
    live.redis.meta["w1"][1] = b"3"
    other = asyncio.create_task(bystander())
    for _ in range(12):
        await live.turn()
    other.cancel()
    followed = live.fleet.followed()
    assert live.index.num_blocks(followed[WorkerId("w0")].slot) >= num
    assert live.index.num_blocks(followed[WorkerId("w1")].slot) >= num
    assert sum(size for _, size in slices) >= 2 * num
    assert max(size for _, size in slices) <= SLICE
    by_turn = Counter(turn for turn, size in slices if size > SLICE // 2)
    assert max(by_turn.values()) == 1


async def test_a_snapshot_replaces_what_was_known_at_once_and_not_before(live: Live) -> None:
    live.add_replicas(num_pages=10**6)
    live.index.max_entries = 10**6
    for _ in range(3):
        await live.turn()
    assert live.is_whole()
    live.redis.epoch += 1
    num = 2 * _SLICES * SLICE
    live.redis.meta["w0"] = [str(live.redis.epoch).encode(), b"1", b"1"]
    live.redis.snapshot["w0"] = snapshot.pack(live.redis.epoch, 1, map(RoutingDigest, range(100, 100 + num)))
    slot, sizes = live.fleet.followed()[WorkerId("w0")].slot, []
    for _ in range(8):
        await live.turn()
        sizes.append(live.index.num_blocks(slot))
    assert set(sizes) == {len(DIGESTS), num}
