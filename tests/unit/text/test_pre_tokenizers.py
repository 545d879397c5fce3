"""A GGUF file that does not say how its vocabulary splits texts is recognised for certain, or refused."""

import logging
from pathlib import Path

import pytest

from ostrya.errors import ModelLoadError
from ostrya.text.pre_tokenizers import pre_tokenizer
from ostrya.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.files import ORDINARY, write_gguf

DIGITS = (*ORDINARY, "33", "333", "!", '"')
MERGES = ("a b", "3 3", "33 3")
LLAMA3 = {128_000: "<|begin_of_text|>", 128_001: "<|end_of_text|>", 128_009: "<|eot_id|>"}
QWEN2 = {151_643: "<|endoftext|>", 151_644: "<|im_start|>", 151_645: "<|im_end|>"}
GPT2 = {0: "!", 1: '"', 50_256: "<|endoftext|>"}
QWEN35 = {248_044: "<|endoftext|>", 248_045: "<|im_start|>", 248_046: "<|im_end|>"}
GPT4O = {0: "!", 1: '"', 199_999: "<|endoftext|>"}
DEEPSEEK_BEGIN, DEEPSEEK_END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
DEEPSEEK_LLM = {100_000: DEEPSEEK_BEGIN, 100_001: DEEPSEEK_END}
DEEPSEEK_CODER = {32_013: DEEPSEEK_BEGIN, 32_014: DEEPSEEK_END, 32_021: "<|EOT|>"}
DEEPSEEK_V3 = {0: DEEPSEEK_BEGIN, 1: DEEPSEEK_END, 128_000: "<\uff5cplace\u2581holder\u2581no\u25810\uff5c>"}
GLM4 = {151_329: "<|endoftext|>", 151_331: "[gMASK]", 151_333: "<sop>"}
KIMI_K2 = {163_584: "[BOS]", 163_585: "[EOS]", 163_586: "<|im_end|>"}
COMMAND_R = {5: "<BOS_TOKEN>", 255_000: "<|START_OF_TURN_TOKEN|>", 255_001: "<|END_OF_TURN_TOKEN|>"}
STARCODER = {0: "<|endoftext|>", 1: "<fim_prefix>", 2: "<fim_middle>", 3: "<fim_suffix>", 4: "<fim_pad>"}
FALCON = {0: ">>TITLE<<", 1: ">>ABSTRACT<<", 2: ">>INTRODUCTION<<", 11: "<|endoftext|>"}
MPT = {0: "<|endoftext|>", 1: "<|padding|>", 2: "!", 3: '"'}
TEKKEN = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 1_000: "\u0100"}
SMOLLM = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", 3: "<repo_name>", 4: "<reponame>"}


def vocabulary(size: int, marks: dict[int, str]) -> list[str]:
    """As large as the real one, of fillers but for the marks and what the tests need."""
    tokens = [f"filler{i}" for i in range(size)]
    needed = [token for token in DIGITS if token not in marks.values()]
    tokens[10 : 10 + len(needed)] = needed
    for token_id, text in marks.items():
        tokens[token_id] = text
    return tokens


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(tokenizer._backend.id_to_token(token_id)) for token_id in tokenizer.encode(text, add_prefix=False)]


@pytest.mark.parametrize("name", [None, "default", ""])
@pytest.mark.parametrize(
    ("size", "marks", "taken", "split"),
    [
        (128_256, LLAMA3, "llama-bpe", ["333", "3"]),
        (151_936, QWEN2, "qwen2", ["3", "3", "3", "3"]),
        (50_257, GPT2, "gpt-2", ["3333"]),
        (49_152, SMOLLM, "smollm", ["3", "3", "3", "3"]),
        (248_320, QWEN35, "qwen35", ["3", "3", "3", "3"]),
        (201_088, GPT4O, "gpt-4o", ["333", "3"]),
        (102_400, DEEPSEEK_LLM, "deepseek-llm", ["3", "3", "3", "3"]),
        (32_256, DEEPSEEK_CODER, "deepseek-coder", ["3", "3", "3", "3"]),
        (129_280, DEEPSEEK_V3, "deepseek-v3", ["333", "3"]),
        (151_552, GLM4, "glm4", ["333", "3"]),
        (163_840, KIMI_K2, "kimi-k2", ["333", "3"]),
        (256_000, COMMAND_R, "command-r", ["3", "3", "3", "3"]),
        (49_152, STARCODER, "starcoder", ["3", "3", "3", "3"]),
        (65_024, FALCON, "falcon", ["333", "3"]),
        (50_432, MPT, "mpt", ["3333"]),
        (131_072, TEKKEN, "tekken", ["3", "3", "3", "3"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_known_vocabulary_is_recognised_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
    name: str | None,
    size: int,
    marks: dict[int, str],
    taken: str,
    split: list[str],
) -> None:
    with caplog.at_level(logging.INFO):
        pre = pre_tokenizer(name, vocabulary(size, marks), Path("m.gguf"))
    assert [piece for piece, _ in pre.split().pre_tokenize_str("3333")] == split
    assert pre is pre_tokenizer(taken, [], Path("m.gguf"))
    assert [record.fields["taken"] for record in caplog.records] == [taken]  # type: ignore[attr-defined]


def test_a_llama_3_file_without_the_name_gives_the_ids_of_llama_3(tmp_path: Path) -> None:
    tokens, ids = vocabulary(128_256, LLAMA3), {"bos": "<|begin_of_text|>"}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", tokens=tokens, merges=MERGES, pre=None, ids=ids))
    assert pieces(tokenizer, "3333") == ["333", "3"]
    assert tokenizer.encode("ab")[0] == 128_000, "its prompts begin with the begin of text"


def test_a_qwen_file_that_says_default_gives_the_ids_of_qwen(tmp_path: Path) -> None:
    tokens = vocabulary(151_936, QWEN2)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", tokens=tokens, merges=MERGES, pre="default"))
    assert pieces(tokenizer, "3333") == ["3", "3", "3", "3"]


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_with_an_unknown_vocabulary_is_refused_with_what_to_do(tmp_path: Path, pre: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", tokens=DIGITS, merges=MERGES, pre=pre)
    with pytest.raises(ModelLoadError) as refused:
        load_tokenizer(path)
    message = str(refused.value)
    assert f"m.gguf: tokenizer.ggml.pre is {'missing' if pre is None else repr(pre)}" in message
    assert f"its vocabulary of {len(DIGITS)} tokens is none of those known" in message
    assert "gguf-new-metadata --pre-tokenizer NAME; supported: gpt-2" in message


@pytest.mark.parametrize(
    ("size", "marks"),
    [
        (49_153, SMOLLM),
        (60_000, {0: "!", 1: '"', 50_257: "<|endoftext|>"}),
        (50_257, {0: "<|endoftext|>", 50_256: "<|im_end|>"}),
        (50_254, MPT),
        (65_025, FALCON),
        (131_000, TEKKEN),
        (128_256, {0: DEEPSEEK_BEGIN, 1: DEEPSEEK_END}),
        (163_840, {163_584: "[BOS]", 163_585: "[EOS]"}),
        (151_936, {151_643: "<|endoftext|>"}),
        (100_352, {100_257: "<|endoftext|>", 100_264: "<|im_start|>", 100_265: "<|im_end|>"}),
        (128_000, {127_000: "<|begin_of_text|>", 127_001: "<|end_of_text|>", 127_009: "<|eot_id|>"}),
    ],
)
def test_a_vocabulary_that_only_resembles_a_known_one_is_refused(size: int, marks: dict[int, str]) -> None:
    with pytest.raises(ModelLoadError, match=f"{size} tokens is none of those known"):
        pre_tokenizer(None, vocabulary(size, marks), Path("m.gguf"))


@pytest.mark.parametrize(
    ("pre", "split"),
    [
        ("llama3", ["333", "3"]),
        ("llama-v3", ["333", "3"]),
        ("llama-bpe", ["333", "3"]),
        ("qwen2", ["3", "3", "3", "3"]),
        ("deepseek-r1-qwen", ["3", "3", "3", "3"]),
        ("smollm", ["3", "3", "3", "3"]),
        ("starcoder", ["3", "3", "3", "3"]),
        ("refact", ["3", "3", "3", "3"]),
        ("gpt-2", ["33", "33"]),
        ("phi-2", ["33", "33"]),
    ],
)
def test_a_name_says_how_digits_are_split(tmp_path: Path, pre: str, split: list[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", tokens=DIGITS, merges=MERGES, pre=pre)
    assert pieces(load_tokenizer(path), "3333") == split
