"""The tokenizer gives the ids transformers gives, whatever file it came from."""

import json
import threading
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from ostrya.errors import ModelLoadError
from ostrya.text.source import resolve_model
from ostrya.text.tokenizer import Tokenizer, load_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text())

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_", "|>")
texts = st.lists(
    st.one_of(
        st.text(max_size=90), st.sampled_from(SPECIALS), st.just("a growing chat turn, long enough to keep " * 3)
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=range(len(GOLDEN["rows"])))
def test_ids_equal_those_of_transformers(tokenizer: Tokenizer, row: dict[str, object]) -> None:
    assert tokenizer.encode(str(row["text"])) == row["ids"]


def test_eos_and_vocabulary_come_from_the_file(tokenizer: Tokenizer) -> None:
    assert (tokenizer.eos_token_ids, tokenizer.vocab_size) == ((2, 0), 49152), "the end of a document ends a turn too"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_the_prefix_token_cache_changes_no_id(tokenizer: Tokenizer, text: str) -> None:
    plain = tokenizer._backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == plain
    assert tokenizer.encode(text) == plain, "the second time from the cache"


# SmolLM2 has no token for a few rare bytes; as in the library they are left out.
@given(text=st.text(st.characters(max_codepoint=0x2FF, exclude_categories=["Cc"]), max_size=200))
@settings(max_examples=60, deadline=None)
def test_decoding_an_encoded_text_gives_it_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
@settings(max_examples=100, deadline=None)
def test_decoding_any_ids_equals_the_library(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_special_tokens_add_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<|im_end|>")) == "a"


def as_directory(tokenizer: Tokenizer, folder: Path, *, template_file: bool = False) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer._backend.to_str())
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "from config"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template_file:
        (folder / "chat_template.jinja").write_text("from file")
    return folder


def test_a_directory_gives_the_same_ids_and_fingerprint_as_the_gguf(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = load_tokenizer(as_directory(tokenizer, tmp_path / "model"))
    assert other.fingerprint == tokenizer.fingerprint
    assert other.eos_token_ids == (2, 0), "generation_config first, then config"
    assert (other.bos_token, other.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert all(other.encode(row["text"]) == row["ids"] for row in GOLDEN["rows"])


def test_a_template_file_is_used_before_the_one_in_the_config(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert load_tokenizer(as_directory(tokenizer, tmp_path / "a")).chat_template == "from config"
    assert load_tokenizer(as_directory(tokenizer, tmp_path / "b", template_file=True)).chat_template == "from file"


def test_the_fingerprint_follows_the_special_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = as_directory(tokenizer, tmp_path / "model")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<new>"])
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).fingerprint != tokenizer.fingerprint


def tiny_gguf(path: Path, *, model: str = "gpt2", pre: str = "gpt-2", add_bos: bool | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    alphabet = [*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "ab", "<s>"]
    writer.add_token_list(alphabet)
    writer.add_token_types([1] * (len(alphabet) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(alphabet) - 1)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", "llama-bpe", "llama3", "llama-v3"])
def test_known_pre_tokenizers_split_words(tmp_path: Path, pre: str) -> None:
    tokenizer = load_tokenizer(tiny_gguf(tmp_path / "m.gguf", pre=pre, add_bos=False))
    assert tokenizer.decode(tokenizer.encode("ab 12")) == "ab 12"


def test_begin_of_sequence_comes_first_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_gguf(tmp_path / "m.gguf", add_bos=True))
    bos = tokenizer.vocab_size - 1
    assert tokenizer.encode("ab") == [bos, *tokenizer.encode("ab", add_prefix=False)]


def test_a_prompt_that_begins_with_the_begin_of_sequence_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_gguf(tmp_path / "m.gguf", add_bos=True))
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.encode("<s>ab") == tokenizer.encode("ab")
    assert tokenizer.encode("<s><s>ab") == [tokenizer.vocab_size - 1, *tokenizer.encode("ab")], "its own two are kept"
    assert tokenizer.encode("") == [tokenizer.vocab_size - 1]


@pytest.mark.parametrize(
    ("kinds", "words"),
    [({"model": "bert"}, ("'bert'", "gpt2")), ({"pre": "bloom"}, ("bloom", "smollm", "qwen2"))],
)
def test_an_unsupported_tokenizer_is_refused_with_what_is_supported(
    tmp_path: Path, kinds: dict[str, str], words: tuple[str, ...]
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", **kinds)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError) as refused:
        load_tokenizer(path)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize("size", [0, 3, 10, 100, 2000])
def test_a_file_cut_short_is_refused_in_one_line(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    with resolve_model("smollm2-135m-instruct").path.open("rb") as whole:
        path.write_bytes(whole.read(size))
    with pytest.raises(ModelLoadError) as refused:
        load_tokenizer(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


def test_another_file_is_refused_as_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        load_tokenizer(path)


def test_a_long_text_leaves_the_interpreter_to_other_threads(tokenizer: Tokenizer) -> None:
    """Held by the tokenizer, the lock would stop every stream of a router; the loop below would hardly turn."""
    text = " ".join(str(number * 7919 % 104729) for number in range(100_000))  # about a second
    encoding = threading.Thread(target=tokenizer.encode, args=(text,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        turns += 1
    encoding.join()
    assert turns > 300_000  # millions when it is free, some 40,000 when it is held
