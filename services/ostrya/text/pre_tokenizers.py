"""How a GGUF file's byte-level BPE splits a text before merging: by the name that the file gives, or by its vocabulary.

A file without a name is split wrongly in silence by whoever guesses; here it is recognised for certain, or refused.
Called by formats.py.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from ostrya.errors import ModelLoadError

log = logging.getLogger(__name__)

# The split patterns that llama.cpp keeps by these names; each is the one of the model's own tokenizer.json.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"


def _byte_level(*, split: str | None = None, digits: bool = False) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), plain])
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]) if digits else plain


@dataclass(frozen=True, slots=True)
class Pre:
    """What happens to a text before its merges."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    """Unless the file says otherwise."""


_GPT2 = Pre(_byte_level)
_DIGITS = Pre(lambda: _byte_level(digits=True))
_LLAMA_BPE = Pre(lambda: _byte_level(split=_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN = Pre(lambda: _byte_level(split=_QWEN2), nfc=True)
_PRE = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
}
_UNKNOWN = ("", "default")
"""What converters wrote before the key existed, or for a vocabulary they did not know."""

_VOCABULARIES: dict[str, dict[int, str]] = {
    "llama-bpe": {128_000: "<|begin_of_text|>", 128_001: "<|end_of_text|>", 128_009: "<|eot_id|>"},
    "qwen2": {151_643: "<|endoftext|>", 151_644: "<|im_start|>", 151_645: "<|im_end|>"},
    "gpt-2": {0: "!", 1: '"', 50_256: "<|endoftext|>"},
    "smollm": {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", 3: "<repo_name>", 4: "<reponame>"},
}
"""Tokens at ids where no other family has them: special ones follow the ordinary ones, so an id tells their number."""
_NUM_TOKENS = {"smollm": 49_152}
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
    found = _recognised(tokens)
    what = "is missing" if name is None else f"is {name!r}"
    if found is None:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.pre {what}, and its vocabulary of {len(tokens)} tokens is none of those known "
            f"({', '.join(_VOCABULARIES)}); convert the model again, or set the key: "
            f"gguf-new-metadata --pre-tokenizer NAME; supported: {', '.join(_PRE)}"
        )
    log.info("vocabulary recognised", extra={"fields": {"tokenizer_ggml_pre": what, "taken": found, "file": str(path)}})
    return _PRE[found]


def _recognised(tokens: Sequence[str]) -> str | None:
    for name, marks in _VOCABULARIES.items():
        is_long_enough = len(tokens) > max(marks) and len(tokens) == _NUM_TOKENS.get(name, len(tokens))
        if is_long_enough and all(tokens[token_id] == text for token_id, text in marks.items()):
            return name
    return None
