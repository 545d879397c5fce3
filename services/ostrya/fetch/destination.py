"""The directory that a fetch fills: complete or not there. Only one process at a time writes it.

Files gather in a sibling directory, a marker with all their sizes is written last, and one rename makes them appear.
A crash at any point leaves a sibling that the next fetch removes. A node that loses power may lose file contents that
were renamed already; their sizes tell then, so nothing waits for the disk.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import msgspec

from ostrya.fetch.remote import FetchFailed

MARKER = ".ostrya-fetch.json"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What a complete destination holds."""

    source: str
    """As it was asked for."""
    part: str
    revision: str
    sizes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


class Destination:
    """`path` and what stands beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        if not self.path.name:
            raise FetchFailed(f"{self.path} cannot be replaced; name a directory in it, like {self.path / 'model'}")
        self.partial = self._beside("partial")
        self.scratch = self._beside("scratch")
        """For what is needed on the way; there while the destination is filled."""
        self._old, self._lock = self._beside("old"), self._beside("lock")

    def complete(self, *, source: str, part: str) -> Marker | None:
        """The marker, if it is of this source and every file has its size. Writes nothing, asks nobody."""
        try:
            marker = msgspec.json.decode((self.path / MARKER).read_bytes(), type=Marker)
            have = {name: (self.path / name).stat().st_size for name in marker.sizes}
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return None
        return marker if (marker.source, marker.part, marker.sizes) == (source, part, have) else None

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Alone with the destination; `waiting` is called if somebody else is filling it. The lock dies with its owner,
        and whoever fills has deadlines, so the wait needs none. Its file is gone afterwards."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._check_replaceable()
        with ExitStack() as stack:
            lock = stack.enter_context(self._lock.open("w"))
            while not self._taken(lock, waiting):
                lock = stack.enter_context(self._lock.open("w"))
            try:
                yield
            finally:
                self._lock.unlink(missing_ok=True)

    @contextmanager
    def filling(self) -> Iterator[Path]:
        """An empty directory to fill; gone if the block fails. Hold the lock."""
        self._sweep()
        self.partial.mkdir()
        self.scratch.mkdir()
        try:
            yield self.partial
        finally:
            self._sweep()

    def publish(self, *, source: str, part: str, revision: str) -> Marker:
        """What was filled in is the destination from now on."""
        files = sorted(path for path in self.partial.rglob("*") if path.is_file() and path.name != MARKER)
        sizes = {path.relative_to(self.partial).as_posix(): path.stat().st_size for path in files}
        marker = Marker(source=source, part=part, revision=revision, sizes=sizes)
        (self.partial / MARKER).write_bytes(msgspec.json.encode(marker))
        if self.path.exists():
            self.path.rename(self._old)
        self.partial.rename(self.path)
        return marker

    def _taken(self, lock: TextIO, waiting: Callable[[], None]) -> bool:
        """Locks the file; False if its owner has removed it meanwhile, so that others lock another one."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return os.path.samestat(os.fstat(lock.fileno()), self._lock.stat())
        except FileNotFoundError:
            return False

    def _check_replaceable(self) -> None:
        if self.path.is_mount():
            raise FetchFailed(f"{self.path} is a volume itself; name a directory in it, like {self.path / 'model'}")
        if not self.path.exists() or (self.path / MARKER).is_file():
            return
        if not self.path.is_dir() or any(self.path.iterdir()):
            raise FetchFailed(f"{self.path} exists and was not made by `ostrya fetch`; remove it or name another")

    def _sweep(self) -> None:
        for path in (self.partial, self.scratch, self._old):
            if path.exists():
                shutil.rmtree(path)

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{what}")


def free_bytes(path: Path) -> int:
    """On the disk of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
