"""An archive becomes files, all of them or an error: a tar, plain or gzipped, read to its very end. For fetching.py."""

import gzip
import io
import tarfile
import zlib
from pathlib import Path

from ostrya.fetch.remote import FetchFailed, one_line

_GZIP = b"\x1f\x8b"
_END_BYTES = 2 * tarfile.BLOCKSIZE
"""Of zeros, which end every tar; more of them may fill its last record."""
_READ_BYTES = 1 << 20


def unpack(archive: Path, directory: Path) -> None:
    """FetchFailed for what is none, was cut short or damaged, or has links; OSError for this machine's part."""
    try:
        with _opened(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            tar.extractall(directory, filter=_plain_files)
            _check_end(stream, tar.offset)
    except (_Refused, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        kind = "is no archive that can be unpacked here (a tar, plain or gzipped)"
        raise FetchFailed(f"{archive.name} {kind}: {one_line(error)}") from error


class _Refused(Exception):
    """Not one of tarfile's own: some of those it only notes down."""


def _opened(archive: Path) -> io.BufferedIOBase:
    # By content: storage may have undone the compression that the name speaks of.
    with archive.open("rb") as stream:
        is_gzip = stream.read(len(_GZIP)) == _GZIP
    return gzip.open(archive) if is_gzip else archive.open("rb")


def _plain_files(member: tarfile.TarInfo, directory: str) -> tarfile.TarInfo:
    """The standard library's filter, and no links at all: neither models nor compile caches need one."""
    if not (member.isfile() or member.isdir()):
        raise _Refused(f"{member.name!r} is neither a file nor a folder")
    return tarfile.data_filter(member, directory)


def _check_end(stream: io.BufferedIOBase, offset: int) -> None:
    """tarfile takes a header that is damaged or missing for the end, and stops short of gzip's checksum."""
    stream.seek(offset)
    num_zeros = 0
    while block := stream.read(_READ_BYTES):
        if block.strip(b"\0"):
            raise _Refused(f"it is damaged after byte {offset}; pack it again")
        num_zeros += len(block)
    if num_zeros < _END_BYTES:
        raise _Refused(f"it ends at byte {offset} without an end mark, cut short; pack it again")
