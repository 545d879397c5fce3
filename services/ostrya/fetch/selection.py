"""Which files of a model's folder are fetched. Pure. Never a pickle or a program: .bin, .pt, .py are not listed."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Literal

from ostrya.fetch.remote import FetchFailed
from ostrya.gguf_header import part_names

Part = Literal["model", "tokenizer", "everything"]
"""tokenizer: what a router reads. everything: the folder as it is, for a compile cache."""

_RANKS = ("tiktoken.model", "*.tiktoken")
"""What a few models have in place of a tokenizer.json."""
_TOKENIZER = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", *_RANKS),
)
_MODEL = (*_TOKENIZER, "*.json", "*.safetensors")
_TWICE = "consolidated*.safetensors"
"""Some models bring their weights a second time under this name."""


def choose(names: Collection[str], part: Part) -> list[str]:
    """The names to fetch, sorted. FetchFailed when the folder is no model.

    A GGUF file holds tokenizer and weights in one, so both parts of such a model are the whole file, or all files of a
    split one.
    """
    if part == "everything":
        return sorted(names)
    # Folders inside a model's folder hold other formats of the same weights.
    top = [name for name in names if "/" not in name and not fnmatchcase(name, _TWICE)]
    has_weights = any(name.endswith(".safetensors") for name in top)
    has_tokenizer = bool(_matching(top, ("tokenizer.json", *_RANKS)))
    if (part == "tokenizer" and has_tokenizer) or (part == "model" and has_weights):
        return _matching(top, _TOKENIZER if part == "tokenizer" else _MODEL)
    return _gguf(top, part)


def _gguf(names: Iterable[str], part: Part) -> list[str]:
    files = sorted(name for name in names if name.endswith(".gguf"))
    parts = part_names(files[0]) if files else ()
    if missing := sorted(set(parts) - set(files)):
        raise FetchFailed(f"there is no {missing[0]}, a part of the split model {files[0]}")
    if len(files) > len(parts):
        shown = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
        raise FetchFailed(f"there are {len(files)} .gguf files; name one of them in the source: {shown}")
    if not files:
        wanted = "tokenizer.json" if part == "tokenizer" else ".safetensors"
        raise FetchFailed(f"there is no {wanted} and no .gguf file; name the folder that holds the model")
    return files


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
