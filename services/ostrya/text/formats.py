"""Tokenizers as they are stored: GGUF metadata, or a Hugging Face directory.

Both become a `tokenizers` backend and what goes with it. Called by tokenizer.py only.
"""

import json
import logging
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ostrya.errors import ModelLoadError
from ostrya.gguf_header import Metadata, Value, read_first
from ostrya.text.pieces import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, byte_fallback, sentence_pieces
from ostrya.text.pre_tokenizers import pre_tokenizer

log = logging.getLogger(__name__)

JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None

_BRACKETED = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_BARRED = re.compile(r"<([|\uff5c]).+\1>|\[\|.+\|\]")
"""How only control tokens are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tokenizer as its files give it."""

    backend: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """What the files name; what ends a turn is more: turns.py."""
    prefix_ids: tuple[int, ...]
    """What a plain prompt begins with, e.g. the begin-of-sequence token."""
    chat_template: str | None
    bos_token: str
    eos_token: str


def from_gguf(path: Path, *, known: Set[str]) -> Stored:
    """The tokenizer inside a GGUF file, or in the first part of a split one. ModelLoadError if it has none, one of
    another kind, or one whose numbers cannot be. `known` are special tokens of files without types."""
    keys = _Keys(path, read_first(path).metadata)
    kind = keys.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        what = f"tokenizer model {_shown(kind)} is not supported"
        raise ModelLoadError(f"{path}: {what}; supported: {', '.join(map(repr, _KINDS))}")
    tokens = keys.texts("tokenizer.ggml.tokens")
    try:
        backend, adds_bos = _KINDS[kind](keys, tokens, path, known)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception for a merge of tokens that do not exist
        raise ModelLoadError(f"{path}: its merges do not fit its tokens: {str(error)[:200]!r}") from error
    bos, eos, eot, eom = keys.named_ids(len(tokens))
    add_bos = keys.flag("tokenizer.ggml.add_bos_token", adds_bos)
    return Stored(
        backend=backend,
        vocab_size=len(tokens),
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in (eos, eot, eom) if token_id is not None)),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        chat_template=keys.text("tokenizer.chat_template"),
        bos_token=tokens[bos] if bos is not None else "",
        eos_token=tokens[eos] if eos is not None else "",
    )


def _byte_level(keys: "_Keys", tokens: list[str], path: Path, known: Set[str]) -> tuple[Tokenizer, bool]:
    """A backend, and whether a prompt begins with the begin of sequence unless the file says otherwise."""
    pre = pre_tokenizer(keys.text("tokenizer.ggml.pre"), tokens, path)
    model = models.BPE(vocab=_ids_of(tokens), merges=keys.merges(), ignore_merges=pre.ignore_merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre.split()
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    _mark_added(backend, tokens, _types(keys, tokens, path, known))
    return backend, pre.add_bos


def _sentence_piece(keys: "_Keys", tokens: list[str], path: Path, _: Set[str]) -> tuple[Tokenizer, bool]:
    types = keys.token_types(len(tokens))
    if not types:
        raise ModelLoadError(f"{path}: tokenizer.ggml.token_type is missing; convert the model again")
    unknown = keys.token_id("unknown", len(tokens))
    space_prefix = keys.flag("tokenizer.ggml.add_space_prefix", True)
    backend = sentence_pieces(
        tokens,
        keys.scores(len(tokens)),
        types,
        unknown=None if unknown is None else tokens[unknown],
        space_prefix=space_prefix,
    )
    # A prefix would be put before their own text too, and none of them found. So they are looked for in what was
    # written, and a space comes after them, as after any added token.
    _mark_added(backend, tokens, types, normalized=not space_prefix)
    return backend, True


def _gemma4(keys: "_Keys", tokens: list[str], path: Path, known: Set[str]) -> tuple[Tokenizer, bool]:
    unknown = keys.token_id("unknown", len(tokens))
    backend = byte_fallback(_ids_of(tokens), keys.merges(), unknown=None if unknown is None else tokens[unknown])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    _mark_added(backend, tokens, _types(keys, tokens, path, known))
    return backend, True


_KINDS: dict[str | None, Callable[["_Keys", list[str], Path, Set[str]], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "gemma4": _gemma4,
}
"""By what `tokenizer.ggml.model` calls them: byte-level BPE, SentencePiece's BPE, and the latter with merges."""


class _Keys:
    """Typed access to the metadata of one file; ModelLoadError names the key whose value cannot be."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self._path, self._metadata = path, metadata

    def text(self, key: str) -> str | None:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self._error(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise ModelLoadError(f"{self._path}: {key} is missing or empty; convert the model again with its tokenizer")
        return [item for item in value if isinstance(item, str)]

    def merges(self) -> list[tuple[str, str]]:
        return [tuple(merge.split(" ")) for merge in self.texts("tokenizer.ggml.merges")]  # type: ignore[misc]

    def scores(self, num_tokens: int) -> list[float]:
        key = "tokenizer.ggml.scores"
        value = self._metadata.get(key)
        if not isinstance(value, list) or len(value) != num_tokens:
            raise self._error(key, value, f"one number for each of {num_tokens} tokens")
        for token_id, score in enumerate(value):
            if not isinstance(score, float) or not math.isfinite(score):
                raise self._error(f"{key}[{token_id}]", score, "a finite number")
        return [score for score in value if isinstance(score, float)]

    def token_types(self, num_tokens: int) -> list[int]:
        """One for each token, or none at all."""
        value = self._metadata.get("tokenizer.ggml.token_type", [])
        if not isinstance(value, list) or len(value) not in (0, num_tokens):
            what = f"{len(value)} long" if isinstance(value, list) else _shown(value)
            wanted = f"one number for each of {num_tokens} tokens is needed"
            raise ModelLoadError(f"{self._path}: tokenizer.ggml.token_type is {what}; {wanted}")
        for token_id, kind in enumerate(value):
            if not _is_int(kind):
                raise self._error(f"tokenizer.ggml.token_type[{token_id}]", kind, "a whole number")
        return [kind for kind in value if _is_int(kind)]

    def named_ids(self, num_tokens: int) -> tuple[int | None, ...]:
        """Begin of sequence, end of sequence, end of turn, end of message."""
        return tuple(self.token_id(name, num_tokens) for name in ("bos", "eos", "eot", "eom"))

    def token_id(self, name: str, num_tokens: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._metadata.get(key)
        if value is None or (_is_int(value) and 0 <= value < num_tokens):
            return value
        raise self._error(key, value, f"a token id from 0 to {num_tokens - 1}")

    def _error(self, key: str, value: Value | None, wanted: str) -> ModelLoadError:
        what = f"{key} is {_shown(value)}; it must be {wanted}"
        return ModelLoadError(f"{self._path}: {what}; correct it with gguf-new-metadata or convert the model again")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """For a message of one line, whatever a file holds."""
    return reprlib.repr(value)


def _ids_of(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _types(keys: "_Keys", tokens: list[str], path: Path, known: Set[str]) -> list[int]:
    """Of each token; guessed, and said so, where the file has none."""
    if types := keys.token_types(len(tokens)):
        return types
    types = _guessed_types(tokens, keys.merges(), named=set(keys.named_ids(len(tokens))), known=known)
    fields = {"path": str(path), "num_control": types.count(CONTROL)}
    log.warning("GGUF without token types; special tokens are known by their text", extra={"fields": fields})
    return types


def _guessed_types(
    tokens: list[str], merges: list[tuple[str, str]], *, named: Set[int | None], known: Set[str]
) -> list[int]:
    """For a file that has none. Only what no merge makes was added to a vocabulary: of that what the file names, what
    is known and what bars enclose is control; what stands in other brackets ("<think>") stays visible in a text."""
    made = {"".join(merge) for merge in merges}

    def guessed(token_id: int, token: str) -> int:
        if token_id in named:
            return CONTROL
        if token in made or not _BRACKETED.fullmatch(token):
            return NORMAL
        return CONTROL if token in known or _BARRED.fullmatch(token) else USER_DEFINED

    return [guessed(token_id, token) for token_id, token in enumerate(tokens)]


def _mark_added(backend: Tokenizer, tokens: list[str], types: list[int], *, normalized: bool = False) -> None:
    """Special tokens, and plain ones that are matched before the text is split."""
    of_kind: dict[int, list[str]] = {}
    for token, kind in zip(tokens, types, strict=False):
        of_kind.setdefault(kind, []).append(token)
    special = [*of_kind.get(CONTROL, ()), *of_kind.get(UNKNOWN, ())]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    plain = of_kind.get(USER_DEFINED, ())
    backend.add_tokens([AddedToken(token, special=False, normalized=normalized) for token in plain])


def from_directory(path: Path) -> Stored:
    """The tokenizer of a Hugging Face directory. ModelLoadError if its files cannot be used."""
    file = path / "tokenizer.json"
    try:
        text = file.read_text(encoding="utf-8")
        backend = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a broken file
        raise ModelLoadError(f"{file} cannot be used: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config, generation, settings = (
        _json_file(path / name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    num_ids = _num_ids(path / "config.json", config, vocab_size)
    _check_added(file, text, backend, num_ids)
    bos, eos = (_token_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    eos_id = backend.token_to_id(eos)
    eos_ids = [
        *_ids(path / "generation_config.json", generation, num_ids),
        *_ids(path / "config.json", config, num_ids),
        *([] if eos_id is None else [eos_id]),
    ]
    return Stored(
        backend=backend,
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        prefix_ids=_prefix(file, backend, vocab_size),
        chat_template=_directory_template(path, settings),
        bos_token=bos,
        eos_token=eos,
    )


def _num_ids(path: Path, config: dict[str, JsonValue], vocab_size: int) -> int:
    """How many token ids the model has: often more than its tokenizer knows."""
    value = config.get("vocab_size", vocab_size)
    if not _is_int(value) or value < 1:
        raise ModelLoadError(f"{path}: vocab_size is {_shown(value)}; it must be a positive number")
    return value


def _check_added(path: Path, text: str, backend: Tokenizer, num_ids: int) -> None:
    """The library numbers added tokens itself and says nothing where the file means another id."""
    for entry in _added_entries(text):
        content, token_id = entry.get("content"), entry.get("id")
        actual = backend.token_to_id(content) if isinstance(content, str) else None
        what = f"{path}: added token {_shown(content)} has id {_shown(token_id)}"
        if token_id != actual or not _is_int(token_id):
            raise ModelLoadError(f"{what}, but ids without a gap would make it {actual}; save the tokenizer again")
        if token_id >= num_ids:
            raise ModelLoadError(
                f"{what}, and the model's ids end at {num_ids - 1} (vocab_size of config.json); remove the token, or "
                "resize the model's embedding"
            )


def _added_entries(text: str) -> Iterator[dict[str, JsonValue]]:
    """The added tokens of a tokenizer.json, without the time that reading all of its vocabulary again would take."""
    for found in re.finditer(r'"added_tokens"\s*:\s*(?=\[)', text):
        entries, _ = json.JSONDecoder().raw_decode(text, found.end())
        yield from (entry for entry in entries if isinstance(entry, dict))


def _json_file(path: Path) -> dict[str, JsonValue]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(entry: JsonValue) -> str:
    """A token is written as a string, or as an object with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def _ids(path: Path, config: dict[str, JsonValue], num_ids: int) -> Iterator[int]:
    entry = config.get("eos_token_id")
    for item in entry if isinstance(entry, list) else [] if entry is None else [entry]:
        if not _is_int(item) or not 0 <= item < num_ids:
            wanted = f"token ids are whole numbers from 0 to {num_ids - 1}"
            raise ModelLoadError(f"{path}: eos_token_id is {_shown(entry)}; {wanted}; correct it")
        yield item


def _prefix(path: Path, backend: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """What the post-processor puts before a text. What it puts after is left out: a prompt is to be continued."""
    whole, plain = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    if beyond := [token_id for token_id in whole[:start] if token_id >= vocab_size]:
        raise ModelLoadError(
            f"{path}: post_processor begins with id {beyond[0]}; the tokenizer's end at {vocab_size - 1}"
        )
    return tuple(whole[:start])


def _directory_template(path: Path, settings: dict[str, JsonValue]) -> str | None:
    beside = path / "chat_template.jinja"
    if beside.is_file():
        try:
            return beside.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{beside} cannot be read: {error}") from error
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        named = (item for item in entry if isinstance(item, dict) and item.get("name") == "default")
        entry = next(named, {}).get("template")
    return entry if isinstance(entry, str) else None
