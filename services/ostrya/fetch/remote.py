"""The seam between fetching and where files come from: gcs.py, hub.py, local.py. The two errors of a fetch are here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ostrya.errors import OstryaError


class FetchFailed(OstryaError):
    """Nothing was put at the destination; the message says what, and what to do."""


class Missing(FetchFailed):
    """The source was asked and has nothing under this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a source has."""

    revision: str
    """Changes when the content does."""
    sizes: dict[str, int]
    """Bytes by name; names are relative, with / between folders."""


class Remote(Protocol):
    """One source."""

    def listing(self) -> Listing:
        """Everything below it, or itself when it is one file. Missing or FetchFailed."""

    def download(self, name: str, directory: Path) -> None:
        """Writes directory/name, checked. FetchFailed; OSError for this machine's part. Called from several threads."""


def one_line(error: Exception) -> str:
    """An error's text for the middle of a sentence: libraries write pages."""
    return " ".join(str(error).split())[:300]
