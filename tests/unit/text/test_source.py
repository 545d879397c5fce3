"""References to models mean one thing, or are refused with what would work."""

from pathlib import Path

import pytest

from ostrya.errors import ConfigError, ModelLoadError
from ostrya.text.source import resolve_model


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    source = resolve_model("smollm2-135m-instruct")
    assert source.name == "smollm2-135m-instruct"
    assert source.path.suffix == ".gguf"


def test_a_gguf_file_is_called_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "My-Model.gguf"
    path.touch()
    assert resolve_model(str(path)).name == "my-model"


def test_a_directory_needs_its_config_and_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json and no tokenizer\.json"):
        resolve_model(str(tmp_path))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    assert resolve_model(str(tmp_path)).path == tmp_path


def test_a_directory_may_have_one_rank_file_for_a_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "tiktoken.model"):
        (tmp_path / name).touch()
    assert resolve_model(str(tmp_path)).path == tmp_path
    (tmp_path / "another.tiktoken").touch()
    with pytest.raises(ModelLoadError, match=r"it has no tokenizer\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(("name", "why"), [("nothing/here", "does not exist"), ("a.bin", "neither")])
def test_anything_else_is_refused_with_what_would_work(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "a.bin").touch()
    with pytest.raises(ModelLoadError, match=why) as refused:
        resolve_model(str(tmp_path / name))
    assert "smollm2-135m-instruct" in str(refused.value)


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "Q8.gguf").touch()
    source = resolve_model(str(tmp_path))
    assert (source.path, source.name) == (tmp_path / "Q8.gguf", "q8")
    (tmp_path / "Q4.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files; name the one to serve, like .*Q4\.gguf"):
        resolve_model(str(tmp_path))


PARTS = [f"Big-Q4-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def test_any_part_of_a_split_model_is_the_model(tmp_path: Path) -> None:
    for name in PARTS:
        (tmp_path / name).touch()
    for reference in (tmp_path, *(tmp_path / name for name in PARTS)):
        source = resolve_model(str(reference))
        assert (source.path, source.name) == (tmp_path / PARTS[0], "big-q4")


@pytest.mark.parametrize("gone", PARTS)
def test_a_missing_part_is_named(tmp_path: Path, gone: str) -> None:
    there = [name for name in PARTS if name != gone]
    for name in there:
        (tmp_path / name).touch()
    for reference in (tmp_path, *(tmp_path / name for name in there)):
        with pytest.raises(ModelLoadError, match=rf"{gone} is missing: a split model needs all its 3 parts"):
            resolve_model(str(reference))


def test_a_directory_with_more_than_one_split_model_is_refused(tmp_path: Path) -> None:
    for name in (*PARTS, "other.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"4 \.gguf files; name the one to serve"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path / "other.gguf")).name == "other"


@pytest.mark.parametrize("reference", ["gs://bucket/model", "hf://org/name@main"])
def test_a_remote_model_must_be_fetched_first(reference: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_model(reference)
    assert f"fetch it first: ostrya fetch {reference} DIRECTORY" in str(refused.value)


def test_an_empty_reference_is_not_this_directory() -> None:
    with pytest.raises(ConfigError, match="model is empty"):
        resolve_model("")
