"""Bytes of checkpoint files: in large reads one after another, by a few threads, the next ones while the last are
converted. Called by the weight sources; knows nothing of models, and imports no torch.

Read and not mapped. Measured (ext4, nothing cached, a quarter of 1 GB): mapped, as the safetensors library does it,
540-620 MB/s, and the pages count as the process's memory beside the copy; read in blocks of 128 KiB 280-530 MB/s, of
1 MiB 550-630, of 4 to 64 MiB 510-1600. On network storage a fault of a mapping is a request of 128 KiB at most.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostrya.engine.models.sharding import Part, Region
from ostrya.errors import ModelLoadError

log = logging.getLogger(__name__)

BLOCK_BYTES = 8 << 20
"""At once. GCSFuse asks for at most as much in one request."""
NUM_THREADS = 4
NUM_AHEAD = 2 * NUM_THREADS
"""Blocks read or being read that nobody has taken yet."""
GAP_BYTES = 128 << 10
"""Of a row's unwanted end, up to which whole rows are read. The kernel and FUSE read so much ahead, so it crosses the
storage anyway: rows of 16 KiB of which 4 are wanted came at 240-260 MB/s of wanted bytes when read whole, at 70-180
when read one by one, which still moved twice what was wanted."""
_MAX_HANDLES = 4 * NUM_THREADS
REPORT_EVERY_S = 10.0

Bytes = npt.NDArray[np.uint8]


class Place(NamedTuple):
    """A tensor in a file, as rows one after another."""

    file: Path
    start: int
    row_bytes: int


class Block(NamedTuple):
    """Bytes [low, high) of some rows of a tensor: one read, or one a row where much lies between."""

    place: Place
    at: int
    """Where its rows stand in what is read."""
    first: int
    last: int
    low: int
    high: int

    @property
    def _is_one_read(self) -> bool:
        return self.place.row_bytes - (self.high - self.low) <= GAP_BYTES

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """(byte in the file, number of bytes) of each read."""
        place, begin, num_bytes = self.place, self.place.start + self.low, self.high - self.low
        if self._is_one_read:
            yield begin + self.first * place.row_bytes, (self.last - self.first - 1) * place.row_bytes + num_bytes
        else:
            yield from ((begin + row * place.row_bytes, num_bytes) for row in range(self.first, self.last))

    @property
    def num_bytes(self) -> int:
        """That are read."""
        num_rows, width = self.last - self.first, self.high - self.low
        return (num_rows - 1) * self.place.row_bytes + width if self._is_one_read else num_rows * width

    def rows_of(self, raw: Bytes) -> Bytes:
        """[rows, high - low] of what was read."""
        num_rows, width = self.last - self.first, self.high - self.low
        stride = self.place.row_bytes if self._is_one_read else width
        return np.lib.stride_tricks.as_strided(raw, (num_rows, width), (stride, 1))


def blocks(
    place: Place, rows: Part, *, low: int, high: int, unit: int = 1, max_bytes: int | None = None
) -> Iterator[Block]:
    """Bytes [low, high) of these rows, in blocks of at most `max_bytes` (BLOCK_BYTES) and of a multiple of `unit` rows,
    or of one unit."""
    if low == high:
        return
    row_bytes = place.row_bytes if place.row_bytes - (high - low) <= GAP_BYTES else high - low
    step = max(unit, (max_bytes or BLOCK_BYTES) // row_bytes // unit * unit)
    for at, start, stop in rows.ranges:
        for first in range(start, stop, step):
            yield Block(place, at + first - start, first, min(first + step, stop), low, high)


def is_covered(part: Part) -> bool:
    """Nothing of it is 0 because no range covers it."""
    return sum(one.stop - one.start for one in part.ranges) == part.size


def skips_rows(region: Region) -> bool:
    """Some of its rows come in no block, because a shard has nothing there."""
    return not is_covered(region.rows) or not region.parts[-1].ranges


def span(part: Part, *, of: int = 1) -> tuple[int, int]:
    """The values that a shard has of a row lie in [low, high), which is cut at multiples of `of` only."""
    low = min((one.start for one in part.ranges), default=0)
    high = max((one.stop for one in part.ranges), default=0)
    return low // of * of, -(-high // of) * of


def shifted(part: Part, *, of: int = 1) -> Part:
    """The same of a row that begins with the span."""
    low, _ = span(part, of=of)
    return Part(part.size, tuple(one.moved(-low) for one in part.ranges))


class Reader:
    """Reads blocks; inside of ahead() those that are expected are mostly there already."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        """Read so far."""
        self._clock = clock
        self._files = _Files()
        self._pool: ThreadPoolExecutor | None = None
        self._coming: Iterator[Block] = iter(())
        self._ahead: deque[tuple[Block, Future[Bytes]]] = deque()
        self._progress = Progress(0, clock())

    @contextmanager
    def ahead(self, expected: Sequence[Block]) -> Iterator[None]:
        """Reads these in their order, as they are taken, and logs how far it is."""
        self._progress = Progress(sum(block.num_bytes for block in expected), self._clock())
        self._coming = iter(expected)
        pool = self._pool = ThreadPoolExecutor(NUM_THREADS, "reader")
        try:
            self._fill(pool)
            yield
            self._progress.finish(self._clock())
        finally:
            self._pool = None
            self._ahead.clear()
            pool.shutdown(cancel_futures=True)
            self._files.close()

    def read(self, block: Block) -> Bytes:
        """Its rows, [last - first, high - low]. ModelLoadError when the file cannot be read or ends before."""
        self.num_bytes += block.num_bytes
        if self._pool is None:
            raw = self._files.read(block)
            self._files.close()
            return block.rows_of(raw)
        found = next((index for index, (one, _) in enumerate(self._ahead) if one == block), None)
        if found is None:
            return block.rows_of(self._files.read(block))
        # What stands before it was passed over: whoever expected it has changed their mind.
        for _ in range(found):
            self._ahead.popleft()[1].cancel()
        raw = self._ahead.popleft()[1].result()
        self._fill(self._pool)
        self._progress.add(block.num_bytes, self._clock())
        return block.rows_of(raw)

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        for block in islice(self._coming, NUM_AHEAD - len(self._ahead)):
            self._ahead.append((block, pool.submit(self._files.read, block)))


class Progress:
    """How far it is, logged now and then."""

    def __init__(self, total_bytes: int, began_s: float) -> None:
        self._total_bytes, self._began_s = total_bytes, began_s
        self._num_bytes = 0
        self._next_s = began_s + REPORT_EVERY_S

    def add(self, num_bytes: int, now_s: float) -> None:
        """So many more have been read."""
        self._num_bytes += num_bytes
        if now_s >= self._next_s:
            self._next_s = now_s + REPORT_EVERY_S
            left_s = (now_s - self._began_s) * (self._total_bytes / self._num_bytes - 1)
            self._log("loading weights", now_s, percent=round(100 * self._num_bytes / self._total_bytes), left_s=left_s)

    def finish(self, now_s: float) -> None:
        """Nothing more comes."""
        self._log("weights are read", now_s, seconds=now_s - self._began_s)

    def _log(self, message: str, now_s: float, **more: float) -> None:
        gb_per_s = self._num_bytes / 1e9 / max(now_s - self._began_s, 1e-9)
        fields = {"gb": self._num_bytes / 1e9, "of_gb": self._total_bytes / 1e9, "gb_per_s": gb_per_s} | more
        log.info(message, extra={"fields": {name: round(value, 2) for name, value in fields.items()}})


class _Files:
    """Open files. A handle is one thread's at a time and its next reads lie ahead of its last ones, so that whoever
    fetches behind a network file system sees long sequential reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[tuple[Path, int]] = deque()

    def read(self, block: Block) -> Bytes:
        raw = np.empty(block.num_bytes, np.uint8)
        view, path = raw.data, block.place.file
        try:
            handle = self._take(path)
            try:
                for start, num_bytes in block.runs:
                    _read_exactly(handle, view[:num_bytes], start)
                    view = view[num_bytes:]
            finally:
                self._give(path, handle)
        except EOFError as error:
            raise ModelLoadError(f"{path}: it has become shorter while it was read; fetch it again") from error
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
        return raw

    def close(self) -> None:
        """Of those that nobody uses."""
        with self._lock:
            while self._free:
                os.close(self._free.pop()[1])

    def _take(self, path: Path) -> int:
        with self._lock:
            for one in self._free:
                if one[0] == path:
                    self._free.remove(one)
                    return one[1]
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _give(self, path: Path, handle: int) -> None:
        with self._lock:
            self._free.append((path, handle))
            if len(self._free) > _MAX_HANDLES:
                os.close(self._free.popleft()[1])


def _read_exactly(handle: int, view: memoryview, start: int) -> None:
    while view:
        num_read = os.preadv(handle, [view], start)
        if not num_read:
            raise EOFError
        start, view = start + num_read, view[num_read:]
