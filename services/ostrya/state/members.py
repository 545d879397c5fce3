"""Who is in a pool: a packed row per worker, removed by the worker or by a router that saw its lease long gone."""

from collections.abc import Mapping

import msgspec

from ostrya.service import checks
from ostrya.state import keys, rows
from ostrya.state.connection import Command, Connection, script
from ostrya.state.keys import MAX_WORKER_ID, is_worker_id
from ostrya.state.rows import Kind, Rejects

_MAX_NAME = 1_024
_MAX_COUNT = 2**31 - 1


class Member(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a worker says about itself; a router asks it again with GetInfo before it sends anything."""

    worker_id: str
    address: str
    """host:port that routers dial."""
    model: str
    page_size: int
    routing_stride: int
    chain_self_test: bytes
    max_running: int
    context_tokens: int
    vocab_size: int
    epoch: int = 0
    schema: int = 1
    """keys.SCHEMA of the writer; rows from before this field are of schema 1."""


def put(pool: str, member: Member) -> list[Command]:
    """Commands that write the row and keep the table alive."""
    packed = msgspec.msgpack.encode(member)
    return [("EVAL", script("put"), 1, keys.members(pool), member.worker_id, packed, keys.KEPT_MS)]


async def read(
    connection: Connection,
    pool: str,
    *,
    known: Mapping[str, Member] = {},
    rejects: Rejects | None = None,
) -> dict[str, Member]:
    """The rows by worker id: the known ones and rows.MAX_ROWS more. One that cannot be read counts as unchanged, if it
    is known, and is left out otherwise."""
    table, told = keys.members(pool), rejects or Rejects()
    return await rows.read(connection, table, kind=Kind.MEMBER, decode=decode, known=known, rejects=told)


def decode(worker_id: str, raw: bytes) -> Member:
    """One row, every field within its bounds. ValueError or a msgspec error if it is none."""
    member = _decoder.decode(raw)
    if member.worker_id != worker_id or not is_worker_id(worker_id):
        raise ValueError(f"worker_id is {member.worker_id[:MAX_WORKER_ID]!r}; it must be its field, printable ASCII")
    if len(member.address) > _MAX_NAME or not checks.is_address(member.address):
        raise ValueError(f"address is {member.address[:_MAX_NAME]!r}; it must be host:port")
    if len(member.model) > _MAX_NAME or len(member.chain_self_test) > _MAX_NAME:
        raise ValueError(f"model or chain_self_test is longer than {_MAX_NAME}")
    for name in ("page_size", "routing_stride", "max_running", "context_tokens", "vocab_size", "schema"):
        rows.within(name, getattr(member, name), least=1, most=_MAX_COUNT)
    rows.within("epoch", member.epoch, least=0, most=keys.MAX_EPOCH)
    return member


_decoder = msgspec.msgpack.Decoder(Member)


async def forget(connection: Connection, pool: str, member: Member) -> bool:
    """Removes the member's rows unless somebody has written a new one since. True if it did."""
    tables = (keys.members(pool), keys.load(pool))
    return await connection.run("forget", tables, (member.worker_id, msgspec.msgpack.encode(member))) == 1
