"""The only place that names Redis keys, and how long they live.

One hash tag per worker, so its scripts touch one slot; one per pool for what all its workers share. Every key expires,
so a pool that is gone leaves nothing behind.
"""

import re
from dataclasses import dataclass

SCHEMA = 1
"""Of everything that is written under these keys; grows with each change that an older reader would misread."""

LEASE_MS = 3_000
"""A worker that did not renew for this long is gone."""

KEPT_MS = 20 * LEASE_MS
"""Everything else outlives its worker's last word by this much, so that a pause heals without a rebuild."""

MAX_EPOCH = 2**53 - 1
"""Scripts count in doubles, exactly up to here; milliseconds get there in 285,000 years."""

MAX_WORKER_ID = 253
"""The longest name of a Kubernetes pod."""
_WORKER_ID = re.compile(rf"[!-~]{{1,{MAX_WORKER_ID}}}")


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    """What one worker writes; nobody else does."""

    lease: str
    """STRING epoch: alive while it exists."""
    meta: str
    """HASH e (epoch), s (last sequence number), ss (that of the snapshot; -1 = it is still to come)."""
    journal: str
    """STREAM, id epoch-seq: b = packed events, or s = nothing but a snapshot to fetch."""
    snapshot: str
    """STRING: all resume points at one sequence number."""


def is_worker_id(text: str) -> bool:
    """Printable ASCII without spaces, as long as a pod's name may be: it stands in keys, labels and log lines."""
    return _WORKER_ID.fullmatch(text) is not None


def worker_keys(pool: str, worker_id: str) -> WorkerKeys:
    """The keys of one worker, in the order in which scripts take them."""
    tag = f"ostrya:{{{pool}/{worker_id}}}"
    return WorkerKeys(f"{tag}:lease", f"{tag}:meta", f"{tag}:journal", f"{tag}:snapshot")


def members(pool: str) -> str:
    """HASH worker id → packed Member."""
    return f"ostrya:{{{pool}}}:members"


def load(pool: str) -> str:
    """HASH worker id → packed LoadRow."""
    return f"ostrya:{{{pool}}}:load"
