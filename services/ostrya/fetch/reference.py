"""What `ostrya fetch` is told to get: a bucket's folder or object, a model on the Hub, or something on this machine."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ostrya.errors import ConfigError

ARCHIVES = (".tar", ".tar.gz", ".tgz")
"""What the standard library unpacks everywhere."""
_OTHER_ARCHIVES = (".tar.zst", ".tar.xz", ".tar.bz2", ".zip")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{2,221}")
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w.-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsSource:
    """gs://bucket/path: an object if it ends like an archive or a .gguf file, else a folder. A part of a split .gguf
    means all of them, as in the other sources."""

    bucket: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """hf://org/name[/file.gguf][@revision]."""

    repo: str
    file: str
    """Empty = the model's folder."""
    revision: str
    """Empty = main."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSource:
    """A file or a directory here, as in a baked image."""

    path: Path


Source: TypeAlias = GcsSource | HubSource | LocalSource


def parse(reference: str) -> Source:
    """ConfigError when it is none of them."""
    if reference.endswith(_OTHER_ARCHIVES):
        raise ConfigError([f"source {reference!r} cannot be unpacked; it may be {', '.join(ARCHIVES)}"])
    scheme, separator, rest = reference.partition("://")
    if not separator:
        if not reference:
            raise ConfigError(["source is empty; give gs://bucket/path, hf://org/name or a path"])
        return LocalSource(path=Path(reference).expanduser())
    if scheme == "gs":
        bucket, _, path = rest.partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError([f"source {reference!r} has no valid bucket name; it must be like gs://bucket/path"])
        return GcsSource(bucket=bucket, path=path.strip("/"))
    if scheme == "hf":
        match = _HUB.fullmatch(rest)
        if match is None:
            raise ConfigError(
                [f"source {reference!r} must be like hf://org/name, hf://org/name@revision or hf://org/name/file.gguf"]
            )
        return HubSource(repo=match["repo"], file=match["file"] or "", revision=match["revision"] or "")
    raise ConfigError([f"source {reference!r} has the scheme {scheme!r}; it must be gs://, hf:// or a path"])


def is_archive(name: str) -> bool:
    return name.endswith(ARCHIVES)


def is_file(name: str) -> bool:
    """Whether a name means one file rather than a folder."""
    return is_archive(name) or name.endswith(".gguf")
