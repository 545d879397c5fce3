"""How a GGUF file's byte-level BPE splits a text before merging: by the name that the file gives, or by its vocabulary.

A file without a name is split wrongly in silence by whoever guesses; here it is recognised for certain, or refused.
Called by gguf_vocabulary.py and rank_files.py.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from ostrya.errors import ModelLoadError
from ostrya.text import split_patterns as patterns

log = logging.getLogger(__name__)


def _plain() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _plain()])


def _split(*stages: str) -> pre_tokenizers.PreTokenizer:
    """By one pattern after another, what a later one finds within what the earlier ones left whole."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in stages]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _falcon() -> pre_tokenizers.PreTokenizer:
    """Digits come after bytes, so a byte that is spelled as one stands apart too: it is so in the model's own file."""
    stages = [
        pre_tokenizers.Punctuation("contiguous"),
        _plain(),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    return pre_tokenizers.Sequence(stages)


@dataclass(frozen=True, slots=True)
class Pre:
    """What happens to a text before its merges."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    """A piece that is a token as a whole is that token, whatever the merges say."""
    add_bos: bool = False
    """Unless the file says otherwise."""


_GPT2 = Pre(_plain)
_DIGITS = Pre(_digits)
_LLAMA_BPE = Pre(partial(_split, patterns.LLAMA3), ignore_merges=True, add_bos=True)
_QWEN = Pre(partial(_split, patterns.QWEN2), nfc=True)
_GLM4 = Pre(partial(_split, patterns.LLAMA3), ignore_merges=True)
_PRE = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": Pre(_plain, nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": Pre(_digits, nfc=True),
    "falcon": Pre(_falcon),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": Pre(partial(_split, patterns.QWEN35), nfc=True),
    "deepseek-llm": Pre(partial(_split, *patterns.DEEPSEEK_LLM)),
    "deepseek-coder": Pre(partial(_split, *patterns.DEEPSEEK_CODER)),
    "deepseek-v3": Pre(partial(_split, *patterns.DEEPSEEK_V3)),
    "gpt-4o": Pre(partial(_split, patterns.GPT4O), ignore_merges=True),
    "tekken": Pre(partial(_split, patterns.TEKKEN), ignore_merges=True, add_bos=True),
    "glm4": _GLM4,
    "chatglm-bpe": _GLM4,
    "kimi-k2": Pre(partial(_split, patterns.KIMI_K2), ignore_merges=True),
}
_UNKNOWN = ("", "default")
"""What converters wrote before the key existed, or for a vocabulary they did not know."""

_DEEPSEEK_BEGIN = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_VOCABULARIES: dict[str, dict[int, str]] = {
    "llama-bpe": {128_000: "<|begin_of_text|>", 128_001: "<|end_of_text|>", 128_009: "<|eot_id|>"},
    "qwen2": {151_643: "<|endoftext|>", 151_644: "<|im_start|>", 151_645: "<|im_end|>"},
    "qwen35": {248_044: "<|endoftext|>", 248_045: "<|im_start|>", 248_046: "<|im_end|>"},
    "gpt-2": {0: "!", 1: '"', 50_256: "<|endoftext|>"},
    "gpt-4o": {0: "!", 1: '"', 199_999: "<|endoftext|>"},
    "deepseek-llm": {100_000: _DEEPSEEK_BEGIN, 100_001: _DEEPSEEK_END},
    "deepseek-coder": {32_013: _DEEPSEEK_BEGIN, 32_014: _DEEPSEEK_END, 32_021: "<|EOT|>"},
    "deepseek-v3": {0: _DEEPSEEK_BEGIN, 1: _DEEPSEEK_END, 128_000: "<\uff5cplace\u2581holder\u2581no\u25810\uff5c>"},
    "glm4": {151_329: "<|endoftext|>", 151_331: "[gMASK]", 151_333: "<sop>"},
    "kimi-k2": {163_584: "[BOS]", 163_585: "[EOS]", 163_586: "<|im_end|>"},
    "command-r": {5: "<BOS_TOKEN>", 255_000: "<|START_OF_TURN_TOKEN|>", 255_001: "<|END_OF_TURN_TOKEN|>"},
    "smollm": {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", 3: "<repo_name>", 4: "<reponame>"},
    "starcoder": {0: "<|endoftext|>", 1: "<fim_prefix>", 2: "<fim_middle>", 3: "<fim_suffix>", 4: "<fim_pad>"},
    "falcon": {0: ">>TITLE<<", 1: ">>ABSTRACT<<", 2: ">>INTRODUCTION<<", 11: "<|endoftext|>"},
    "mpt": {0: "<|endoftext|>", 1: "<|padding|>", 2: "!", 3: '"'},
    "tekken": {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 1_000: "Ā"},
}
"""Tokens at ids where no other family has them: special ones follow the ordinary ones, so an id tells their number."""
_NUM_TOKENS = {
    "smollm": 49_152,
    "starcoder": 49_152,
    "falcon": 65_024,
    "mpt": 50_432,
    "tekken": 131_072,
}
"""Where special tokens come first, the ids say nothing of the number."""


def pre_tokenizer(name: str | None, tokens: Sequence[str], path: Path) -> Pre:
    """What the file names; without a name, or with "default", what its vocabulary is known to need, with a log line.

    ModelLoadError if neither is known.
    """
    if name is not None and name not in _UNKNOWN:
        if name not in _PRE:
            what = f"pre-tokenizer {name[:64]!r} is not supported"
            raise ModelLoadError(f"{path}: {what}; supported: {', '.join(_PRE)}")
        return _PRE[name]
    found = recognised(tokens)
    what = "is missing" if name is None else f"is {name!r}"
    if found is None:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.pre {what}, and its vocabulary of {len(tokens)} tokens is none of those known "
            f"({', '.join(_VOCABULARIES)}); convert the model again, or set the key: "
            f"gguf-new-metadata --pre-tokenizer NAME; supported: {', '.join(_PRE)}"
        )
    log.info("vocabulary recognised", extra={"fields": {"tokenizer_ggml_pre": what, "taken": found, "file": str(path)}})
    return _PRE[found]


def pre_named(name: str) -> Pre:
    """What a known family needs."""
    return _PRE[name]


def recognised(tokens: Sequence[str]) -> str | None:
    """The name of the family whose tokens these are, and of no other's."""
    for name, marks in _VOCABULARIES.items():
        is_long_enough = len(tokens) > max(marks) and len(tokens) == _NUM_TOKENS.get(name, len(tokens))
        if is_long_enough and all(tokens[token_id] == text for token_id, text in marks.items()):
            return name
    return None
