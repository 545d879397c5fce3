"""The load board of a pool: how busy each worker is. Workers write it several times a second, routers read it."""

import logging

import msgspec

from ostrya.state import keys
from ostrya.state.connection import Command, Connection

log = logging.getLogger(__name__)


class LoadRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One worker's load. Counts are of its engine, tokens are prompt tokens."""

    stamp: int
    """The worker's clock in ms: another stamp, another row."""
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    free_pages: int = 0
    reusable_pages: int = 0
    total_pages: int = 0
    prefill_tokens_per_s: float = 0.0
    queried_tokens: int = 0
    hit_tokens: int = 0


def put(pool: str, worker_id: str, row: LoadRow) -> list[Command]:
    """Commands that write the row and keep the table alive."""
    table = keys.load(pool)
    return [("HSET", table, worker_id, msgspec.msgpack.encode(row)), ("PEXPIRE", table, keys.KEPT_MS)]


async def read(connection: Connection, pool: str) -> dict[str, LoadRow]:
    """All rows by worker id; one that cannot be read is left out and logged."""
    found = {}
    for worker_id, raw in (await connection.rows(keys.load(pool))).items():
        try:
            found[worker_id] = msgspec.msgpack.decode(raw, type=LoadRow)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            log.warning("load row cannot be read", extra={"fields": {"worker_id": worker_id, "error": str(error)}})
    return found
