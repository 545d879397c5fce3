"""Files of this machine as a source: a model in the image, an archive on a volume, and the tests."""

import shutil
from pathlib import Path

from ostrya.fetch.remote import FetchFailed, Listing, Missing
from ostrya.gguf_header import part_names


class LocalRemote:
    """A Remote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._base = path if path.is_dir() else path.parent

    def listing(self) -> Listing:
        if not self._path.exists():
            raise Missing(f"{self._path} does not exist")
        parts = [self._base / name for name in part_names(self._path.name)]
        files = [one for one in (parts if self._path.is_file() else self._path.rglob("*")) if one.is_file()]
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
