"""A folder or an object in Google Cloud Storage as a source. The client library checks each file's CRC32C.

Credentials are the machine's own (Workload Identity in a cluster); without any, public buckets can be read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostrya.fetch.reference import GcsSource, is_file
from ostrya.fetch.remote import FetchFailed, Listing, Missing, one_line
from ostrya.gguf_header import model_stem, part_names

if TYPE_CHECKING:
    from google.cloud import storage


class GcsRemote:
    """A Remote."""

    def __init__(self, source: GcsSource) -> None:
        self._source = source
        self._url = f"gs://{source.bucket}/{source.path}"
        # A folder's objects are named after it, an object's name is its own.
        folder, _, name = source.path.rpartition("/") if is_file(source.path) else (source.path, "", "")
        self._prefix = f"{folder}/" if folder else ""
        self._wanted = {self._prefix + part for part in part_names(name)} if name else None
        self._asked = self._prefix + (name if len(part_names(name)) == 1 else model_stem(name))
        self._client = _client()
        self._blobs: dict[str, storage.Blob] = {}

    def listing(self) -> Listing:
        with self._explained():
            for blob in self._client.list_blobs(self._source.bucket, prefix=self._asked):
                # A name that ends with / is how consoles show an empty folder.
                if not blob.name.endswith("/") and (self._wanted is None or blob.name in self._wanted):
                    self._blobs[blob.name.removeprefix(self._prefix)] = blob
        if not self._blobs:
            raise Missing(f"there is nothing at {self._url}; its bucket exists")
        return Listing(
            revision=str(max(blob.generation for blob in self._blobs.values())),
            sizes={name: blob.size for name, blob in self._blobs.items()},
        )

    def download(self, name: str, directory: Path) -> None:
        blob = self._blobs[name]
        target = directory / name
        with self._explained():
            blob.download_to_filename(target, checksum="crc32c", if_generation_match=blob.generation)
        # The library unpacks what was stored as gzip.
        if blob.content_encoding != "gzip" and target.stat().st_size != blob.size:
            raise FetchFailed(f"{self._url}: {name} has {target.stat().st_size} of {blob.size} bytes; fetch it again")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """The library's errors in our words."""
        from google.api_core import exceptions as api
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption
        from requests.exceptions import RequestException

        bucket = self._source.bucket
        try:
            yield
        except api.NotFound as error:
            raise FetchFailed(f"bucket {bucket} does not exist, or an object left it; look at {self._url}") from error
        except (api.Forbidden, api.Unauthorized) as error:
            grant = "grant this pod's service account roles/storage.objectViewer on the bucket"
            raise FetchFailed(f"no permission to read {self._url}; {grant}") from error
        except api.PreconditionFailed as error:
            raise FetchFailed(f"{self._url} changed while it was read; fetch it again") from error
        except DataCorruption as error:
            raise FetchFailed(f"{self._url} arrived damaged (CRC32C does not match); fetch it again") from error
        except (api.GoogleAPIError, GoogleAuthError, RequestException) as error:
            raise FetchFailed(f"{self._url} cannot be read: {one_line(error)}") from error


def _client() -> "storage.Client":
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage
    except ImportError as error:
        raise FetchFailed("gs:// needs a library that is not installed: pip install 'ostrya[fetch]'") from error
    try:
        # Reading needs no project, and asking for one takes seconds outside Google Cloud.
        return storage.Client(project=None)
    except DefaultCredentialsError:
        return storage.Client.create_anonymous_client()
