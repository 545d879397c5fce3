"""From a source to a complete directory: list, choose, download in parallel, check, unpack, publish."""

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ostrya.fetch.archive import unpack
from ostrya.fetch.destination import Destination, Marker, free_bytes
from ostrya.fetch.local import LocalRemote
from ostrya.fetch.reference import GcsSource, HubSource, Source, is_archive, parse
from ostrya.fetch.remote import FetchFailed, Listing, Remote
from ostrya.fetch.selection import Part, choose

NUM_PARALLEL = 8
"""Files at a time: one stream of object storage carries about an eighth of what a node takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What is at the destination now."""

    was_there: bool
    marker: Marker


def fetch(reference: str, destination: Path, part: Part, *, say: Callable[[str], None]) -> Fetched:
    """Makes `destination` a complete copy of what `reference` names. `say` hears what a person waits for.

    ConfigError for a reference that is none, Missing if there is nothing, FetchFailed or OSError otherwise; the
    destination is then what it was before.
    """
    source = parse(reference)
    target = Destination(destination)
    if marker := target.complete(source=reference, part=part):
        return Fetched(was_there=True, marker=marker)
    with target.locked(lambda: say(f"another process is fetching {target.path}; waiting for it")):
        if marker := target.complete(source=reference, part=part):
            return Fetched(was_there=True, marker=marker)
        with target.filling() as directory:
            return Fetched(was_there=False, marker=_fill(source, reference, target, directory, part))


def _fill(source: Source, reference: str, target: Destination, directory: Path, part: Part) -> Marker:
    remote = _remote(source, target.scratch)
    listing = remote.listing()
    names = _chosen(listing, part, reference)
    needed = sum(listing.sizes[name] for name in names)
    if needed > free_bytes(directory):
        raise _no_space(target.path, needed)
    try:
        if len(names) == 1 and is_archive(names[0]):
            _download(remote, names, target.scratch)
            unpack(target.scratch / names[0], directory)
            _keep(directory, part, reference)
        else:
            _download(remote, names, directory)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(target.path, needed) from error
        raise
    return target.publish(source=reference, part=part, revision=listing.revision)


def _remote(source: Source, scratch: Path) -> Remote:
    # The two libraries are imported by the one who needs them, and only then.
    if isinstance(source, GcsSource):
        from ostrya.fetch.gcs import GcsRemote

        return GcsRemote(source)
    if isinstance(source, HubSource):
        from ostrya.fetch.hub import HubRemote

        return HubRemote(source, scratch=scratch)
    return LocalRemote(source.path)


def _chosen(listing: Listing, part: Part, reference: str) -> list[str]:
    names = list(listing.sizes)
    if len(names) != 1 or not is_archive(names[0]):
        try:
            names = choose(names, part)
        except FetchFailed as error:
            raise FetchFailed(f"{reference}: {error}") from error
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise FetchFailed(f"{reference} has a file called {name!r}, which would leave the destination; refused")
    return names


def _download(remote: Remote, names: list[str], directory: Path) -> None:
    for folder in {(directory / name).parent for name in names}:
        folder.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="fetch")
    try:
        for future in as_completed([pool.submit(remote.download, name, directory) for name in names]):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _keep(directory: Path, part: Part, reference: str) -> None:
    """Leaves of what was unpacked what a folder would have given; FetchFailed when it is no model."""
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    try:
        unwanted = files.keys() - choose(files, part)
    except FetchFailed as error:
        raise FetchFailed(f"{reference} was unpacked, but {error}; an archive must have it at its top") from error
    for name in unwanted:
        files[name].unlink()


def _no_space(path: Path, needed: int) -> FetchFailed:
    free = free_bytes(path.parent)
    return FetchFailed(
        f"no space for {path}: it takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; give it a larger volume"
    )
