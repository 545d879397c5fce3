"""Numbers in a model's files that cannot be are refused at load, with file, key, value and limit; what nobody needs may
be anything."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from ostrya.errors import ModelLoadError
from ostrya.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.logs import ours
from tests.unit.gguf_bytes import ARRAY, STRING, UINT32, array, entry, insert, string
from tests.unit.text.files import ORDINARY, write_directory, write_gguf

TOP = len(ORDINARY)
"""Id of the only special token, and the last id there is."""


def refusal(path: Path) -> str:
    """One line that begins with the model's path."""
    with pytest.raises(ModelLoadError) as refused:
        load_tokenizer(path)
    message = str(refused.value)
    assert message.isprintable(), message
    assert message.startswith(str(path))
    return message


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
@pytest.mark.parametrize(
    ("value", "shown"), [(TOP + 1, TOP + 1), (-1, -1), (True, True), (2.0, 2.0), (2**31 - 1, 2147483647)]
)
def test_a_token_id_of_a_gguf_is_in_its_vocabulary(tmp_path: Path, name: str, value: float, shown: object) -> None:
    message = refusal(write_gguf(tmp_path / "m.gguf", control=("</s>",), ids={name: value}))
    assert f"tokenizer.ggml.{name}_token_id is {shown}; it must be a token id from 0 to {TOP}" in message


def test_the_last_token_is_in_the_vocabulary(tmp_path: Path) -> None:
    assert load_tokenizer(write_gguf(tmp_path / "m.gguf", control=("</s>",), ids={"eos": TOP})).eos_token_ids == (TOP,)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (entry("tokenizer.ggml.add_bos_token", UINT32, b"\1\0\0\0"), "add_bos_token is 1; it must be true or false"),
        (entry("tokenizer.chat_template", UINT32, b"\1\0\0\0"), "chat_template is 1; it must be a text"),
        (entry("tokenizer.chat_template", STRING, string(b"caf\xe9")), "metadata tokenizer.chat_template is not UTF-8"),
        (entry("tokenizer.chat_template", ARRAY, array(STRING, *[string(b"a\n")] * 999)), "chat_template is ['a\\n', "),
    ],
    ids=range(4),
)
def test_a_key_that_is_needed_must_be_what_it_is_for(tmp_path: Path, line: bytes, words: str) -> None:
    message = refusal(insert(write_gguf(tmp_path / "m.gguf"), line))
    assert words in message
    assert len(message) < 500


def test_every_token_has_a_type(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", control=("</s>",))
    raw = path.read_bytes()
    types = b"token_type" + b"\t\0\0\0\5\0\0\0"
    at = raw.index(types) + len(types)
    assert raw[at] == TOP + 1
    # One type fewer, and the four bytes it took made a value of the next array's count: cut them out.
    path.write_bytes(raw[:at] + bytes([TOP]) + raw[at + 1 : at + 8] + raw[at + 12 :])
    assert f"token_type is {TOP} long; one number for each of {TOP + 1} tokens is needed" in refusal(path)


def test_a_type_is_a_whole_number(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", control=("</s>",))
    integers, floats = b"token_type" + b"\t\0\0\0\5\0\0\0", b"token_type" + b"\t\0\0\0\6\0\0\0"
    path.write_bytes(path.read_bytes().replace(integers, floats))
    assert "tokenizer.ggml.token_type[0] is 1.4" in refusal(path)


def test_special_tokens_of_a_gguf_without_types_are_known_by_their_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Like the file that has them. "<b>" looks special and is made by merges, as in code."""
    tokens = (*ORDINARY, "<", ">", "<b", "<b>")
    merges = ("a b", "< b", "<b >")
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"

    def load(name: str, *, has_types: bool) -> Tokenizer:
        path = write_gguf(
            tmp_path / name,
            tokens=tokens,
            merges=merges,
            control=("<|im_start|>", "<|im_end|>", "</s>", "<end_of_turn>"),
            user_defined=("<think>", "[INST]"),
            template=template,
            ids={"eos": "</s>"},
            has_types=has_types,
        )
        return load_tokenizer(path)

    typed = load("typed.gguf", has_types=True)
    assert "GGUF without token types" not in caplog.text
    bare = load("bare.gguf", has_types=False)
    assert [record.getMessage() for record in ours(caplog)] == [
        "GGUF without token types; special tokens are known by their text"
    ]
    assert bare.fingerprint == typed.fingerprint
    assert bare.eos_token_ids == typed.eos_token_ids == (len(tokens) + 2, len(tokens) + 1, len(tokens) + 3)
    text = "<|im_start|>ab<think><b>[INST]<|im_end|></s><end_of_turn>"
    ids = bare.encode(text)
    assert ids == typed.encode(text)
    assert bare.decode(ids) == "ab<think><b>[INST]"


def test_what_nobody_needs_may_be_anything(tmp_path: Path) -> None:
    plain = load_tokenizer(write_gguf(tmp_path / "a.gguf", control=("</s>",), ids={"eos": "</s>"}))
    path = write_gguf(tmp_path / "b.gguf", control=("</s>",), ids={"eos": "</s>", "padding": 10**6})
    nested = array(ARRAY, array(STRING, string(b"en")), array(STRING))
    odd = (
        entry("general.author", STRING, string(b"Andr\xe9")),
        entry("general.languages", ARRAY, nested),
        entry(b"odd.k\xe9y", ARRAY, array(STRING, string(b"\xff\xfe"))),
    )
    tokenizer = load_tokenizer(insert(path, *odd))
    assert (tokenizer.fingerprint, tokenizer.eos_token_ids) == (plain.fingerprint, plain.eos_token_ids)


@pytest.mark.parametrize("name", ["config", "generation_config"])
@pytest.mark.parametrize("value", [TOP + 1, -1, True, 2.0, "2", [2, TOP + 1], [2, None], {"id": 2}])
def test_a_token_id_of_a_directory_is_in_its_vocabulary(tmp_path: Path, name: str, value: object) -> None:
    folder = write_directory(tmp_path / "m", special=("</s>",), files={name: {"eos_token_id": value}})
    message = refusal(folder)
    assert f"{name}.json: eos_token_id is {value!r}; token ids are whole numbers from 0 to {TOP}; correct it" in message


def test_a_model_may_have_more_ids_than_its_tokenizer_knows(tmp_path: Path) -> None:
    files: Mapping[str, object] = {"config": {"vocab_size": 100, "eos_token_id": [99, None][:1]}}
    assert load_tokenizer(write_directory(tmp_path / "m", files=files)).eos_token_ids == (99,)


@pytest.mark.parametrize("value", [0, True, 96.0, "96"])
def test_the_number_of_ids_is_a_positive_number(tmp_path: Path, value: object) -> None:
    message = refusal(write_directory(tmp_path / "m", files={"config": {"vocab_size": value}}))
    assert f"config.json: vocab_size is {value!r}; it must be a positive number" in message


def test_an_added_token_beyond_the_models_ids_is_refused(tmp_path: Path) -> None:
    message = refusal(write_directory(tmp_path / "m", special=("[PAD]",), files={"config": {"vocab_size": TOP}}))
    assert f"tokenizer.json: added token '[PAD]' has id {TOP}, and the model's ids end at {TOP - 1}" in message


@pytest.mark.parametrize("token_id", [TOP + 1, 10**6, 3])
def test_an_added_token_whose_id_would_silently_become_another_is_refused(tmp_path: Path, token_id: int) -> None:
    folder = write_directory(tmp_path / "m", special=("</s>",), files={})
    file = folder / "tokenizer.json"
    description = json.loads(file.read_text())
    description["added_tokens"][0]["id"] = token_id
    file.write_text(json.dumps(description))
    assert f"added token '</s>' has id {token_id}, but ids without a gap would make it {TOP}" in refusal(folder)


def test_a_post_processor_begins_with_a_token_there_is(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "m", special=("<s>",), files={})
    file = folder / "tokenizer.json"
    description = json.loads(file.read_text())
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [4_000_000], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(description))
    assert f"post_processor begins with id 4000000; the tokenizer's end at {TOP}" in refusal(folder)


def test_the_tokenizer_is_in_the_first_part_of_a_split_model(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    split = (entry("split.no", UINT32, b"\0\0\0\0"), entry("split.count", UINT32, b"\2\0\0\0"))
    insert(write_gguf(first, control=("</s>",), ids={"eos": "</s>"}), *split)
    for part in (first, second):
        assert load_tokenizer(part).eos_token_ids == (TOP,)
    first.unlink()
    with pytest.raises(ModelLoadError, match=r"m-00001-of-00002\.gguf is missing: it is part 1 of 2"):
        load_tokenizer(second)


def test_a_broken_directory_is_one_line(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "m", files={})
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja cannot be read" in refusal(folder)
    (folder / "generation_config.json").write_text("[" * 100_000)
    assert re.search(r"generation_config\.json is not JSON", refusal(folder))
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json cannot be used" in refusal(folder)
