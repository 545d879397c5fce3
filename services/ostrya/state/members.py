"""Who is in a pool: a packed row per worker, removed by the worker or by a router that saw its lease long gone."""

import logging

import msgspec

from ostrya.state import keys
from ostrya.state.connection import Command, Connection

log = logging.getLogger(__name__)


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
    table = keys.members(pool)
    return [("HSET", table, member.worker_id, msgspec.msgpack.encode(member)), ("PEXPIRE", table, keys.KEPT_MS)]


async def read(connection: Connection, pool: str) -> dict[str, Member]:
    """All rows by worker id; one that cannot be read is left out and logged."""
    found = {}
    for worker_id, raw in (await connection.rows(keys.members(pool))).items():
        try:
            found[worker_id] = msgspec.msgpack.decode(raw, type=Member)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            log.warning("member row cannot be read", extra={"fields": {"worker_id": worker_id, "error": str(error)}})
    return found


async def forget(connection: Connection, pool: str, member: Member) -> bool:
    """Removes the member's rows unless somebody has written a new one since. True if it did."""
    tables = (keys.members(pool), keys.load(pool))
    return await connection.run("forget", tables, (member.worker_id, msgspec.msgpack.encode(member))) == 1
