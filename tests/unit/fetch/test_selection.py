"""A model's folder is fetched without what we never read, and above all without what could run."""

import pytest

from ostrya.fetch.remote import FetchFailed
from ostrya.fetch.selection import choose

FOLDER = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "README.md", "tokenizer.model"),
    *("pytorch_model.bin", "modeling.py", "model.pt", "original/params.json", "onnx/model.safetensors"),
    *("consolidated.safetensors", "Q4.gguf", "Q8.gguf"),
)
TOKENIZER = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"]


def test_a_model_is_its_safetensors_and_json() -> None:
    weights = ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]
    assert choose(FOLDER, "model") == sorted([*TOKENIZER, *weights, "tokenizer_config.json"])


def test_a_tokenizer_is_without_weights() -> None:
    assert choose(FOLDER, "tokenizer") == [*TOKENIZER, "tokenizer_config.json"]


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_gguf_model_is_one_file_for_both(part: str) -> None:
    assert choose(["Q8.gguf", "README.md", "config.json"], part) == ["Q8.gguf"]  # type: ignore[arg-type]
    split = [f"Q8-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert choose([*split, "README.md"], part) == split  # type: ignore[arg-type]


def test_a_compile_cache_is_taken_whole() -> None:
    assert choose(["b/1", "a"], "everything") == ["a", "b/1"]


@pytest.mark.parametrize(
    ("names", "part", "words"),
    [
        (["Q4.gguf", "Q8.gguf"], "model", "2 .gguf files; name one of them in the source: Q4.gguf, Q8.gguf"),
        (["Q4-00001-of-00002.gguf"], "model", "no Q4-00002-of-00002.gguf, a part of the split model"),
        (["pytorch_model.bin", "config.json"], "model", "no .safetensors and no .gguf"),
        (["model.safetensors"], "tokenizer", "no tokenizer.json and no .gguf"),
    ],
)
def test_what_is_no_model_is_refused(names: list[str], part: str, words: str) -> None:
    with pytest.raises(FetchFailed) as refused:
        choose(names, part)  # type: ignore[arg-type]
    assert words in str(refused.value)
