"""References to models mean one thing, or are refused with what would work."""

from pathlib import Path

import pytest

from ostrya.errors import ModelLoadError
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


@pytest.mark.parametrize(("name", "why"), [("nothing/here", "does not exist"), ("a.bin", "neither")])
def test_anything_else_is_refused_with_what_would_work(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "a.bin").touch()
    with pytest.raises(ModelLoadError, match=why) as refused:
        resolve_model(str(tmp_path / name))
    assert "smollm2-135m-instruct" in str(refused.value)
