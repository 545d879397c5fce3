"""What a real Redis and Valkey do with keys that hold something else: read within bounds, healed by their owner."""

import msgspec
import pytest

from ostrya.errors import Unreadable
from ostrya.prefix.chain import RoutingDigest
from ostrya.prefix.events import Stored
from ostrya.state import board, keys, lease, members
from ostrya.state.board import LoadRow
from ostrya.state.connection import Connection
from ostrya.state.journal import Answer, JournalReader, JournalWriter, Position
from ostrya.state.rows import MAX_ROW_BYTES, MAX_ROWS, Kind, Rejects
from tests.fakes.pool import member

KEYS = keys.worker_keys("p", "w0")
TABLE = keys.members("p")


async def test_one_row_that_cannot_be_read_hurts_no_other(connection: Connection) -> None:
    await connection.all([*members.put("p", member("w0")), *members.put("p", member("w1", "127.0.0.1:2"))])
    garbage = (b"\xff\xfe", b"", b"w\n", b"w" * 300, b"w2")
    await connection.all([("HSET", TABLE, field, b"\xc1") for field in garbage])
    await connection.call("HSET", TABLE, "w1", b"x" * (MAX_ROW_BYTES + 1))
    rejects = Rejects()
    assert (await members.read(connection, "p", rejects=rejects)).keys() == {"w0"}
    assert rejects.counts == {Kind.MEMBER: 6}
    known = {"w1": member("w1"), "w9": member("w9")}
    assert (await members.read(connection, "p", known=known)).keys() == {"w0", "w1"}, "unchanged; w9 has left"


async def test_a_table_of_another_type_is_unreadable_and_its_next_writer_replaces_it(connection: Connection) -> None:
    await connection.all([("SET", TABLE, "x"), ("RPUSH", keys.load("p"), "x")])
    with pytest.raises(Unreadable):
        await members.read(connection, "p")
    with pytest.raises(Unreadable):
        await board.read(connection, "p")
    assert not await members.forget(connection, "p", member())
    await connection.all([*members.put("p", member()), *board.put("p", "w0", LoadRow(stamp=7))])
    assert (await members.read(connection, "p")).keys() == {"w0"}
    assert (await board.read(connection, "p"))["w0"].stamp == 7


async def test_a_table_is_read_in_windows_and_the_known_rows_are_in_each(connection: Connection) -> None:
    num = 3 * MAX_ROWS
    row = member("w0", "127.0.0.1:9")
    packed = {f"x{n}": msgspec.msgpack.encode(msgspec.structs.replace(row, worker_id=f"x{n}")) for n in range(num)}
    await connection.all([*members.put("p", row), *(("HSET", TABLE, name, raw) for name, raw in packed.items())])
    rejects, seen, looks = Rejects(), set[str](), 0
    while len(seen) < num + 1:
        rows = await members.read(connection, "p", known={"w0": row}, rejects=rejects)
        assert "w0" in rows
        assert len(rows) <= MAX_ROWS + 200
        seen |= rows.keys()
        looks += 1
    assert looks <= 4


async def test_lease_meta_journal_or_snapshot_of_another_type_is_healed_by_their_writer(
    connection: Connection, writer: JournalWriter
) -> None:
    reader = JournalReader(connection, pool="p", rejects=Rejects())
    for key in (KEYS.lease, KEYS.meta, KEYS.journal, KEYS.snapshot):
        epoch = await writer.register()
        await writer.append(epoch, 1, [Stored((RoutingDigest(1),))])
        await connection.all([("DEL", key), ("SADD", key, "x")])
        if key == KEYS.journal:
            with pytest.raises(Unreadable):
                await reader.read({"w0": Position(epoch, 0)}, block_ms=10)
            assert await reader.unreadable(["w0", "w1"]) == ["w0"]
        if key == KEYS.meta:
            assert await reader.heads(["w0", "w1"]) == {}
        if key == KEYS.snapshot:
            with pytest.raises(Unreadable):
                await reader.snapshot("w0", most=9)
        answer = await writer.append(epoch, 2, [Stored((RoutingDigest(2),))])
        assert answer is (Answer.NOEPOCH if key in (KEYS.meta, KEYS.journal) else Answer.OK)
        epoch = await writer.register(floor=epoch)
        assert await writer.write_snapshot(epoch, 1, [RoutingDigest(3)]) is Answer.OK
        assert (await lease.remaining_s(connection, "p", ["w0"])).keys() == {"w0"}
        assert await reader.snapshot("w0", most=9) is not None


@pytest.mark.parametrize("value", [b"x", b"", b"-1", b"nan", b"1e300", b"\xff", b"9" * 400, str(2**53).encode()])
async def test_a_meta_field_that_is_no_number_of_ours_is_registered_anew(
    connection: Connection, writer: JournalWriter, value: bytes
) -> None:
    reader, rejects = JournalReader(connection, pool="p", rejects=(rejects := Rejects())), rejects
    for field in ("e", "s"):
        epoch = await writer.register()
        await connection.call("HSET", KEYS.meta, field, value)
        if field == "e":
            assert await reader.heads(["w0"]) == {}
            assert rejects.counts[Kind.HEAD] == 1
        assert await writer.append(epoch, 1, []) in (Answer.NOEPOCH, Answer.GAP)
        again = await writer.register(floor=epoch)
        assert epoch < again <= keys.MAX_EPOCH
        assert await writer.write_snapshot(again, 1, []) is Answer.OK


@pytest.mark.parametrize("entry", [f"{2**60}-1", f"{2**64 - 1}-{2**64 - 2}", f"{2**64 - 1}-{2**64 - 1}"])
async def test_an_id_that_no_worker_makes_does_not_block_the_journal(
    connection: Connection, writer: JournalWriter, entry: str
) -> None:
    epoch = await writer.register()
    await connection.call("XADD", KEYS.journal, entry, "b", b"")
    assert await writer.append(epoch, 1, []) is Answer.NOEPOCH
    again = await writer.register(floor=epoch)
    assert await writer.append(again, 1, []) is Answer.OK
