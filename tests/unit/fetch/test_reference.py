"""Sources are read exactly, and what is none is refused with what would work."""

from pathlib import Path

import pytest

from ostrya.errors import ConfigError
from ostrya.fetch.reference import GcsSource, HubSource, LocalSource, Source, parse


@pytest.mark.parametrize(
    ("reference", "source"),
    [
        ("gs://my-bucket/models/a/", GcsSource(bucket="my-bucket", path="models/a")),
        ("gs://my.bucket_1", GcsSource(bucket="my.bucket_1", path="")),
        ("hf://org/name", HubSource(repo="org/name", file="", revision="")),
        ("hf://org/na.me-1@refs/pr/1", HubSource(repo="org/na.me-1", file="", revision="refs/pr/1")),
        ("hf://org/name/Q8_0.gguf@v1", HubSource(repo="org/name", file="Q8_0.gguf", revision="v1")),
        ("models/a", LocalSource(path=Path("models/a"))),
        ("/a.tar.gz", LocalSource(path=Path("/a.tar.gz"))),
    ],
)
def test_a_source_is_one_of_three_kinds(reference: str, source: Source) -> None:
    assert parse(reference) == source


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("", "source is empty"),
        ("gs:///a", "no valid bucket name"),
        ("gs://UP/a", "no valid bucket name"),
        ("hf://name", "must be like hf://org/name"),
        ("hf://org/name/model.safetensors", "must be like hf://org/name"),
        ("hf://org/name/../x.gguf", "must be like hf://org/name"),
        ("s3://bucket/a", "scheme 's3'"),
        ("gs://bucket/a.tar.zst", "may be .tar, .tar.gz, .tgz"),
    ],
)
def test_anything_else_is_refused_with_what_would_work(reference: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(reference)
    assert words in str(refused.value)
