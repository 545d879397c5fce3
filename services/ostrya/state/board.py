"""The load board of a pool: how busy each worker is. Workers write it several times a second, routers read it."""

from collections.abc import Iterable

import msgspec

from ostrya.state import keys, rows
from ostrya.state.connection import Command, Connection, script
from ostrya.state.rows import Kind, Rejects


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
    step_base_s: float = 0.0
    step_row_s: float = 0.0
    step_prefill_token_s: float = 0.0
    step_kv_token_s: float = 0.0


def put(pool: str, worker_id: str, row: LoadRow) -> list[Command]:
    """Commands that write the row and keep the table alive."""
    return [("EVAL", script("put"), 1, keys.load(pool), worker_id, msgspec.msgpack.encode(row), keys.KEPT_MS)]


async def read(
    connection: Connection, pool: str, *, first: Iterable[str] = (), rejects: Rejects | None = None
) -> dict[str, LoadRow]:
    """The rows by worker id, those of `first` and rows.MAX_ROWS more; one that cannot be read is left out.

    The figures are whatever somebody wrote.
    """
    known: dict[str, LoadRow | None] = dict.fromkeys(first)
    table, told = keys.load(pool), rejects or Rejects()
    return await rows.read(connection, table, kind=Kind.LOAD, decode=decode, known=known, rejects=told)


def decode(worker_id: str, raw: bytes) -> LoadRow:
    """One row. ValueError or a msgspec error if it is none."""
    return _decoder.decode(raw)


_decoder = msgspec.msgpack.Decoder(LoadRow)
