"""Tokenizers as they are stored: GGUF metadata, or a Hugging Face directory.

Both become a `tokenizers` backend and what goes with it. Called by tokenizer.py only.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ostrya.errors import ModelLoadError
from ostrya.gguf_header import Value, read_header

JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types: a special token, and a plain one that is matched before the text is split."""

# The split patterns that llama.cpp keeps by these names; each is the one of the model's own tokenizer.json.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tokenizer as its files give it."""

    backend: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    """What a plain prompt begins with, e.g. the begin-of-sequence token."""
    chat_template: str | None
    bos_token: str
    eos_token: str


def _byte_level(*, split: str | None = None, digits: bool = False) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), plain])
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]) if digits else plain


@dataclass(frozen=True, slots=True)
class _Pre:
    split: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA_BPE = _Pre(lambda: _byte_level(split=_LLAMA3), ignore_merges=True, add_bos=True)
_PRE = {
    "default": _Pre(_byte_level),
    "gpt-2": _Pre(_byte_level),
    "smollm": _Pre(lambda: _byte_level(digits=True)),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": _Pre(lambda: _byte_level(split=_QWEN2), nfc=True),
}


def from_gguf(path: Path) -> Stored:
    """The tokenizer inside a GGUF file. ModelLoadError if it has none, or one of another kind."""
    metadata = read_header(path).metadata
    kind, pre_name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelLoadError(f"{path}: tokenizer model {kind!r} is not supported; supported: 'gpt2' (byte-level BPE)")
    if pre_name not in _PRE:
        raise ModelLoadError(f"{path}: pre-tokenizer {pre_name!r} is not supported; supported: {', '.join(_PRE)}")
    pre = _PRE[str(pre_name)]
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
    merges = [tuple(merge.split(" ")) for merge in _strings(metadata, "tokenizer.ggml.merges", path)]
    backend = _bpe(path, tokens, merges, ignore_merges=pre.ignore_merges)
    backend.pre_tokenizer = pre.split()
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    _mark_special(backend, tokens, metadata.get("tokenizer.ggml.token_type", []))
    bos, eos = (_token_id(metadata, name) for name in ("bos", "eos"))
    eos_ids = [id for id in (eos, _token_id(metadata, "eot"), _token_id(metadata, "eom")) if id is not None]
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)
    template = metadata.get("tokenizer.chat_template")
    return Stored(
        backend=backend,
        vocab_size=len(tokens),
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        chat_template=template if isinstance(template, str) else None,
        bos_token=tokens[bos] if bos is not None and bos < len(tokens) else "",
        eos_token=tokens[eos] if eos is not None and eos < len(tokens) else "",
    )


def _bpe(path: Path, tokens: list[str], merges: list[tuple[str, ...]], *, ignore_merges: bool) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))  # type: ignore[arg-type]
    except Exception as error:  # the library raises bare Exception for a merge of tokens that do not exist
        raise ModelLoadError(f"{path}: its merges do not fit its tokens: {error}") from error


def _mark_special(backend: Tokenizer, tokens: list[str], types: Value) -> None:
    if not isinstance(types, list):
        return
    kinds = list(zip(tokens, types, strict=False))
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [AddedToken(token, special=special, normalized=False) for token, kind in kinds if kind == wanted]
        if special:
            backend.add_special_tokens(marked)
        else:
            backend.add_tokens(marked)


def _strings(metadata: dict[str, Value], key: str, path: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelLoadError(f"{path}: {key} is missing or empty; convert the model again with its tokenizer")
    return [str(item) for item in value]


def _token_id(metadata: dict[str, Value], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) else None


def from_directory(path: Path) -> Stored:
    """The tokenizer of a Hugging Face directory. ModelLoadError if its files cannot be used."""
    try:
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for a missing or broken file
        raise ModelLoadError(f"{path / 'tokenizer.json'} cannot be used: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config, generation, settings = (
        _json_file(path / name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    bos, eos = (_token_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    eos_ids = [
        *_ids(generation.get("eos_token_id")),
        *_ids(config.get("eos_token_id")),
        *_ids(backend.token_to_id(eos)),
    ]
    top_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    return Stored(
        backend=backend,
        vocab_size=top_id + 1,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        prefix_ids=_prefix(backend),
        chat_template=_directory_template(path, settings),
        bos_token=bos,
        eos_token=eos,
    )


def _json_file(path: Path) -> dict[str, JsonValue]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(entry: JsonValue) -> str:
    """A token is written as a string, or as an object with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def _ids(entry: JsonValue) -> Iterable[int]:
    listed = entry if isinstance(entry, list) else [entry]
    return [item for item in listed if isinstance(item, int) and not isinstance(item, bool)]


def _prefix(backend: Tokenizer) -> tuple[int, ...]:
    """What the post-processor puts before a text. What it puts after is left out: a prompt is to be continued."""
    whole, plain = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:start])


def _directory_template(path: Path, settings: dict[str, JsonValue]) -> str | None:
    beside = path / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        named = {item["name"]: item.get("template") for item in entry if isinstance(item, dict) and "name" in item}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
