"""Whether a worker still lives: a key that dies unless its worker renews it."""

from collections.abc import Sequence

from ostrya.state import keys
from ostrya.state.connection import Connection

RENEW_S = 1.0
"""A third of the lease: two renewals may fail before anyone notices."""


async def remaining_s(connection: Connection, pool: str, worker_ids: Sequence[str]) -> dict[str, float]:
    """Seconds each lease has left; workers without one are not in the answer."""
    replies = await connection.all(("PTTL", keys.worker_keys(pool, worker_id).lease) for worker_id in worker_ids)
    return {
        worker_id: ttl / 1000
        for worker_id, ttl in zip(worker_ids, replies, strict=True)
        if isinstance(ttl, int) and ttl >= 0
    }
