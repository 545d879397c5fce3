"""A model on the Hugging Face Hub as a source. HF_TOKEN is its token, HF_ENDPOINT another address.

The library is told to keep nothing of its own: its cache would be a second copy on a disk that may be read-only.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostrya.fetch.reference import HubSource
from ostrya.fetch.remote import FetchFailed, Listing, Missing, one_line
from ostrya.gguf_header import part_names


class HubRemote:
    """A Remote. `scratch` is where the library may write, on the disk that is filled."""

    def __init__(self, source: HubSource, *, scratch: Path) -> None:
        # Read when the library is imported.
        os.environ.setdefault("HF_HOME", str(scratch))
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            import huggingface_hub
        except ImportError as error:
            raise FetchFailed("hf:// needs a library that is not installed: pip install 'ostrya[fetch]'") from error
        self._source, self._scratch = source, scratch
        self._api = huggingface_hub.HfApi(library_name="ostrya")
        self._commit = ""
        self._sizes: dict[str, int] = {}

    def listing(self) -> Listing:
        with self._explained():
            info = self._api.model_info(self._source.repo, revision=self._source.revision or None, files_metadata=True)
        self._commit = info.sha or ""
        found = {one.rfilename: one.size or 0 for one in info.siblings or []}
        wanted = self._source.file
        self._sizes = {name: size for name, size in found.items() if not wanted or name in part_names(wanted)}
        if not self._sizes:
            raise Missing(f"hf://{self._source.repo} has no {wanted or 'files'}; it has {len(found)} files")
        return Listing(revision=self._commit, sizes=self._sizes)

    def download(self, name: str, directory: Path) -> None:
        with self._explained():
            # It makes notes beside its files.
            path = self._api.hf_hub_download(self._source.repo, name, revision=self._commit, local_dir=self._scratch)
        size, expected = Path(path).stat().st_size, self._sizes[name]
        if size != expected:
            raise FetchFailed(f"hf://{self._source.repo}: {name} has {size} of {expected} bytes; fetch it again")
        Path(path).rename(directory / name)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """The library's errors in our words."""
        from huggingface_hub import errors as hub

        name, revision = f"hf://{self._source.repo}", self._source.revision or "main"
        try:
            yield
        except hub.RevisionNotFoundError as error:
            raise FetchFailed(f"{name} has no revision {revision}; name a branch, a tag or a commit") from error
        except hub.RepositoryNotFoundError as error:  # also what a closed model says to strangers
            reason = "does not exist, or HF_TOKEN may not read it"
            raise FetchFailed(f"{name} {reason}; check the name, and accept the model's terms") from error
        except (hub.HTTPError, hub.XetDownloadError, OSError) as error:  # type: ignore[attr-defined]
            if isinstance(error, OSError) and error.errno is not None:
                raise  # this machine's, a full disk perhaps
            raise FetchFailed(f"{name} cannot be read: {one_line(error)}") from error
