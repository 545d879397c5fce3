"""Each vocabulary splits texts as the model's own tokenizer does, and gives them back, streamed and whole.

generate_vocabularies.py recorded what the tokenizers gave, with the part of each vocabulary that these texts need.
"""

import base64
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.errors import ModelLoadError
from ostrya.text.detokenize import Detokenizer
from ostrya.text.pieces import BYTE_OF
from ostrya.text.source import resolve_model
from ostrya.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.files import write_gguf, write_sentence_pieces

GOLDEN = json.loads((Path(__file__).parent / "golden_vocabularies.json").read_text())
TEXTS: list[str] = GOLDEN["texts"]
BYTES, PIECES = GOLDEN["byte_level"], GOLDEN["sentence_pieces"]
COMPOSED = {"mpt", "command-r", "qwen35"}
"""They compose characters first, so that is what comes back."""
BEGIN = "<|begin|>"


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(tokenizer._backend.id_to_token(token_id)) for token_id in tokenizer.encode(text, add_prefix=False)]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def byte_tokens(name: str) -> list[str]:
    return [*BYTE_OF, *dict.fromkeys(merge.replace(" ", "") for merge in BYTES[name]["merges"])]


def load(name: str, folder: Path) -> Tokenizer:
    path = write_gguf(
        folder / f"{name}.gguf",
        tokens=byte_tokens(name),
        control=(BEGIN,),
        user_defined=BYTES[name]["user_defined"],
        pre=name,
        merges=BYTES[name]["merges"],
    )
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    return {name: load(name, folder) for name in BYTES}


def test_every_text_is_recorded_for_every_vocabulary() -> None:
    assert len(BYTES) == 13
    assert all(len(vocabulary["rows"]) == len(TEXTS) for vocabulary in [*BYTES.values(), *PIECES.values()])


@pytest.mark.parametrize("name", BYTES)
def test_tokens_equal_those_of_the_models_own_tokenizer(loaded: dict[str, Tokenizer], name: str) -> None:
    for text, expected in zip(TEXTS, BYTES[name]["rows"], strict=True):
        assert tokens_of(loaded[name], text) == expected, text


@pytest.mark.parametrize("name", BYTES)
def test_a_text_comes_back_streamed_and_whole(loaded: dict[str, Tokenizer], name: str) -> None:
    for text in TEXTS:
        ids = loaded[name].encode(text, add_prefix=False)
        whole = unicodedata.normalize("NFC", text) if name in COMPOSED else text
        assert streamed(loaded[name], ids) == loaded[name].decode(ids) == whole


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), name=st.sampled_from(sorted(BYTES)))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_whatever_the_split(loaded: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = loaded[name]
    ids = tokenizer._encode_without_specials(text)
    whole = unicodedata.normalize("NFC", text) if name in COMPOSED else text
    assert streamed(tokenizer, ids) == tokenizer.decode(ids) == whole


@pytest.mark.parametrize("name", BYTES)
def test_a_special_token_in_a_content_is_text(loaded: dict[str, Tokenizer], name: str) -> None:
    tokenizer = loaded[name]
    begin = tokenizer._backend.token_to_id(BEGIN)
    ids = tokenizer.encode_marked(f"{BEGIN}{tokenizer.mark(f'I say {BEGIN}', '@')}{BEGIN}", "@")
    assert [position for position, token_id in enumerate(ids) if token_id == begin] == [0, len(ids) - 1]
    assert tokenizer.decode(ids) == f"I say {BEGIN}"


def test_chatglm_has_a_second_name(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    merges = BYTES["glm4"]["merges"]
    path = write_gguf(tmp_path / "m.gguf", tokens=byte_tokens("glm4"), pre="chatglm-bpe", merges=merges)
    assert [tokens_of(load_tokenizer(path), text) for text in TEXTS] == [
        tokens_of(loaded["glm4"], text) for text in TEXTS
    ]


@pytest.mark.parametrize("name", PIECES)
def test_pieces_equal_those_of_the_models_own_tokenizer(tmp_path: Path, name: str) -> None:
    """And the text comes back."""
    vocabulary = PIECES[name]
    has_prefix = vocabulary["space_prefix"]
    path = write_sentence_pieces(
        tmp_path / "m.gguf",
        vocabulary["pieces"],
        user_defined=[token.replace("▁", " ") for token in vocabulary["user_defined"]],
        space_prefix=has_prefix,
    )
    tokenizer = load_tokenizer(path)
    for text, expected in zip(TEXTS, vocabulary["rows"], strict=True):
        assert [token.replace(" ", "▁") for token in tokens_of(tokenizer, text)] == expected, text
        ids = tokenizer.encode(text, add_prefix=False)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids) == (f" {text}" if has_prefix else text)


KIMI_RANKS, KIMI_IDS = 163_584, 163_840
SETTINGS = {
    "eos_token": "[EOS]",
    "bos_token": "[BOS]",
    "added_tokens_decoder": {
        "163584": {"content": "[BOS]", "special": True},
        "163585": {"content": "[EOS]", "special": True},
        "163586": {"content": "<|im_end|>", "special": True},
        "163595": {"content": "<|tool_call_begin|>", "special": False},
    },
}


def write_ranks(
    folder: Path, *, num_ranks: int, settings: object = SETTINGS, name: str = "tiktoken.model", num_ids: int = KIMI_IDS
) -> Path:
    """As large as the real one, of fillers but for what the texts need."""
    spelled = byte_tokens("kimi-k2")
    raw = [bytes(BYTE_OF[character] for character in token) for token in spelled]
    raw += [b"\xff\xfe" + number.to_bytes(3, "big") for number in range(num_ranks - len(raw))]
    folder.mkdir()
    (folder / name).write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(raw)))
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": num_ids, "eos_token_id": 163_586 if num_ids == KIMI_IDS else 0})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_rank_file_gives_the_tokens_of_tiktoken(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "kimi", num_ranks=KIMI_RANKS)
    assert resolve_model(str(folder)).path == folder
    tokenizer = load_tokenizer(folder)
    for text, expected in zip(TEXTS, BYTES["kimi-k2"]["rows"], strict=True):
        assert tokens_of(tokenizer, text) == expected, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (KIMI_IDS, (163_586, 163_585))
    assert tokenizer.encode("[BOS]a<|im_end|><|tool_call_begin|><|reserved_token_163839|>")[2:] == [
        163586,
        163595,
        163839,
    ]
    assert tokenizer.decode([163_586, 163_595, 163_839]) == "<|tool_call_begin|>"


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ({}, "its 999 ranks and the special tokens of tokenizer_config.json are none of the vocabularies known"),
        ({"12": {"content": "[BOS]"}}, "'.BOS.' of tokenizer_config.json has id 12; special ones have ids from 999 to"),
        ({"1256": {"content": "[BOS]"}}, "has id 1256; special ones have ids from 999 to 1255"),
    ],
)
def test_a_rank_file_of_an_unknown_vocabulary_is_refused(
    tmp_path: Path, decoder: dict[str, object], words: str
) -> None:
    settings = {"added_tokens_decoder": decoder}
    folder = write_ranks(tmp_path / "m", num_ranks=999, settings=settings, name="x.tiktoken", num_ids=1_256)
    with pytest.raises(ModelLoadError, match=words):
        load_tokenizer(folder)


@pytest.mark.parametrize("num_ids", [998, 10**9])
def test_the_models_ids_and_the_ranks_belong_together(tmp_path: Path, num_ids: int) -> None:
    folder = write_ranks(tmp_path / "m", num_ranks=999, num_ids=num_ids)
    with pytest.raises(ModelLoadError, match=f"vocab_size of config.json is {num_ids}, and the file has 999 ranks"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n\x0e\n\x05<unk>\x15", "is no file of ranks: line 1"),
        (b"YQ== 0\nYg== 2\n", "line 2 has rank 2; ranks go up by one from 0"),
        (b"YQ== 0\nYg== 1\n", "has no rank for 254 of the 256 bytes; it is cut short"),
        (b"YQ= 0\n", "is no file of ranks: line 1"),
    ],
)
def test_a_broken_rank_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ModelLoadError, match=words):
        load_tokenizer(tmp_path)
