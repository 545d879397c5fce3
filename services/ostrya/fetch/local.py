"""Files of this machine as a source: a model in the image, an archive on a volume, and the tests."""

import shutil
from pathlib import Path

from ostrya.fetch.remote import FetchFailed, Listing, Missing


class LocalRemote:
    """A Remote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._base = path if path.is_dir() else path.parent

    def listing(self) -> Listing:
        if not self._path.exists():
            raise Missing(f"{self._path} does not exist")
        files = [self._path] if self._path.is_file() else [one for one in self._path.rglob("*") if one.is_file()]
        newest_ns = max((one.stat().st_mtime_ns for one in files), default=0)
        sizes = {one.relative_to(self._base).as_posix(): one.stat().st_size for one in files}
        if not sizes:
            raise Missing(f"{self._path} is empty")
        return Listing(revision=str(newest_ns), sizes=sizes)

    def download(self, name: str, directory: Path) -> None:
        try:
            shutil.copyfile(self._base / name, directory / name)
        except shutil.Error as error:
            raise FetchFailed(f"{self._base / name} cannot be copied: {error}") from error
