"""What every Redis must do for the journal: order, fencing, epochs, expiry."""

from itertools import chain

import pytest
from msgspec import structs

from ostrya.errors import StateError, StateUnavailable
from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Event, Removed, Stored, unpack
from ostrya.state import board, keys, lease, members
from ostrya.state.connection import Connection
from ostrya.state.journal import LOG_LENGTH, Answer, Head, JournalReader, JournalWriter, Position
from ostrya.state.members import Member
from tests.fakes.redis_server import RunningRedis

MEMBER = Member(
    worker_id="w0",
    address="127.0.0.1:1",
    model="tiny",
    page_size=16,
    routing_stride=1,
    chain_self_test=b"x",
    max_running=8,
    context_tokens=2048,
    vocab_size=1000,
)


def stored(*digests: int) -> list[Event]:
    return [Stored(tuple(map(RoutingDigest, digests)))]


@pytest.fixture
def reader(connection: Connection) -> JournalReader:
    return JournalReader(connection, pool="p")


async def test_batches_come_back_in_order(writer: JournalWriter, reader: JournalReader) -> None:
    epoch = await writer.register()
    assert await writer.append(epoch, 1, stored(1, 2)) is Answer.OK
    assert await writer.append(epoch, 2, [Removed((RoutingDigest(2),))]) is Answer.OK
    entries = (await reader.read({"w0": Position(epoch, 0)}, block_ms=50))["w0"]
    assert [entry.at for entry in entries] == [Position(epoch, 1), Position(epoch, 2)]
    assert [list(unpack(entry.packed or b"")) for entry in entries] == [stored(1, 2), [Removed((RoutingDigest(2),))]]


async def test_a_repeated_batch_is_ignored(writer: JournalWriter, reader: JournalReader) -> None:
    epoch = await writer.register()
    for _ in range(3):
        assert await writer.append(epoch, 1, stored(1)) is Answer.OK
    assert len((await reader.read({"w0": Position(epoch, 0)}, block_ms=50))["w0"]) == 1


async def test_a_batch_that_skips_one_is_refused(writer: JournalWriter, reader: JournalReader) -> None:
    epoch = await writer.register()
    assert await writer.append(epoch, 2, stored(1)) is Answer.GAP
    assert await reader.read({"w0": Position(epoch, 0)}, block_ms=10) == {}


async def test_a_snapshot_with_the_next_number_closes_a_gap(writer: JournalWriter, reader: JournalReader) -> None:
    epoch = await writer.register()
    assert await writer.write_snapshot(epoch, 5, [RoutingDigest(7)]) is Answer.OK
    assert await writer.append(epoch, 6, stored(8)) is Answer.OK
    marker, batch = (await reader.read({"w0": Position(epoch, 0)}, block_ms=50))["w0"]
    assert (marker.at, marker.packed) == (Position(epoch, 5), None)
    assert batch.at == Position(epoch, 6)
    snapshot = await reader.snapshot("w0", most=9)
    assert snapshot is not None
    assert (snapshot.epoch, snapshot.seq, [*chain(*snapshot.parts)]) == (epoch, 5, [7])


async def test_a_compacting_snapshot_leaves_no_entry(writer: JournalWriter, reader: JournalReader) -> None:
    epoch = await writer.register()
    await writer.append(epoch, 1, stored(1))
    assert await writer.write_snapshot(epoch, 1, [RoutingDigest(1)]) is Answer.OK
    assert len((await reader.read({"w0": Position(epoch, 0)}, block_ms=50))["w0"]) == 1
    assert await reader.heads(["w0", "nobody"]) == {"w0": Head(Position(epoch, 1), snapshot_seq=1)}


async def test_a_registration_has_no_snapshot_yet(writer: JournalWriter, reader: JournalReader) -> None:
    epoch = await writer.register()
    assert await reader.heads(["w0"]) == {"w0": Head(Position(epoch, 0), snapshot_seq=-1)}
    assert await reader.snapshot("w0", most=9) is None


async def test_the_older_process_is_fenced_in_everything_it_tries(writer: JournalWriter) -> None:
    old = await writer.register()
    await writer.register()
    assert await writer.append(old, 1, stored(1)) is Answer.FENCED
    assert await writer.renew(old, 0) is Answer.FENCED
    assert await writer.write_snapshot(old, 1, []) is Answer.FENCED
    assert await writer.leave(old) is Answer.FENCED


async def test_an_emptied_redis_says_noepoch(writer: JournalWriter, connection: Connection) -> None:
    epoch = await writer.register()
    await connection.call("FLUSHALL")
    assert await writer.append(epoch, 1, stored(1)) is Answer.NOEPOCH
    assert await writer.renew(epoch, 0) is Answer.NOEPOCH
    assert await writer.write_snapshot(epoch, 1, []) is Answer.NOEPOCH


async def test_epochs_grow_over_restarts_and_over_an_emptied_redis(
    writer: JournalWriter, connection: Connection
) -> None:
    first = await writer.register()
    second = await writer.register()
    await connection.call("FLUSHALL")
    third = await writer.register(floor=second + 10**9)
    assert first < second < third


async def test_renewal_tells_of_a_lost_tail(writer: JournalWriter, connection: Connection) -> None:
    epoch = await writer.register()
    await writer.append(epoch, 1, stored(1))
    await connection.call("HSET", keys.worker_keys("p", "w0").meta, "s", 0)  # as after a failover
    assert await writer.renew(epoch, 1) is Answer.GAP


async def test_every_key_expires(writer: JournalWriter, connection: Connection) -> None:
    epoch = await writer.register()
    await writer.append(epoch, 1, stored(1))
    await writer.write_snapshot(epoch, 1, [RoutingDigest(1)])
    await connection.all([*members.put("p", MEMBER), *board.put("p", "w0", board.LoadRow(stamp=1))])
    names = await connection.call("KEYS", "*")
    assert isinstance(names, list)
    assert len(names) == 6
    assert all(name.startswith(b"ostrya:{p") for name in names)
    for name in names:
        ttl = await connection.call("PTTL", name)
        assert isinstance(ttl, int)
        assert 0 < ttl <= keys.KEPT_MS, name


async def test_appends_renew_the_lease(writer: JournalWriter, connection: Connection) -> None:
    epoch = await writer.register()
    await connection.call("PEXPIRE", keys.worker_keys("p", "w0").lease, 50)
    await writer.append(epoch, 1, stored(1))
    left = await lease.remaining_s(connection, "p", ["w0", "nobody"])
    assert left.keys() == {"w0"}
    assert 2.5 < left["w0"] <= 3.0


async def test_the_log_is_bounded(writer: JournalWriter, connection: Connection) -> None:
    epoch = await writer.register()
    for seq in range(1, LOG_LENGTH + 400):
        await writer.append(epoch, seq, stored(seq))
    length = await connection.call("XLEN", keys.worker_keys("p", "w0").journal)
    assert isinstance(length, int)
    assert LOG_LENGTH <= length < LOG_LENGTH + 200  # trimmed by whole nodes of 100 entries


async def test_leaving_ends_the_lease_now(writer: JournalWriter, connection: Connection) -> None:
    epoch = await writer.register()
    assert await writer.leave(epoch) is Answer.OK
    assert await lease.remaining_s(connection, "p", ["w0"]) == {}


async def test_a_member_is_forgotten_only_if_unchanged(connection: Connection) -> None:
    await connection.all([*members.put("p", MEMBER), *board.put("p", "w0", board.LoadRow(stamp=1))])
    seen = (await members.read(connection, "p"))["w0"]
    await connection.all(members.put("p", structs.replace(MEMBER, epoch=9)))
    assert not await members.forget(connection, "p", seen)
    assert await members.forget(connection, "p", (await members.read(connection, "p"))["w0"])
    assert await members.read(connection, "p") == {}
    assert await board.read(connection, "p") == {}


async def test_rows_that_cannot_be_read_are_left_out(connection: Connection) -> None:
    await connection.all([*members.put("p", MEMBER), ("HSET", keys.members("p"), "bad", b"\xc1")])
    await connection.call("HSET", keys.load("p"), "bad", b"")
    assert (await members.read(connection, "p")).keys() == {"w0"}
    assert await board.read(connection, "p") == {}


async def test_a_corrupt_snapshot_is_a_clear_error(
    writer: JournalWriter, reader: JournalReader, connection: Connection
) -> None:
    epoch = await writer.register()
    await writer.write_snapshot(epoch, 1, [RoutingDigest(1), RoutingDigest(2)])
    await connection.call("SETRANGE", keys.worker_keys("p", "w0").snapshot, 35, b"\xff")
    with pytest.raises(StateError, match="CRC-32"):
        await reader.snapshot("w0", most=9)


async def test_a_killed_server_is_state_unavailable(writer: JournalWriter, server: RunningRedis) -> None:
    epoch = await writer.register()
    server.kill()
    with pytest.raises(StateUnavailable):
        await writer.append(epoch, 1, stored(1))
    server.restart()
    assert await writer.append(epoch, 1, stored(1)) is Answer.NOEPOCH
