"""Tokenizers inside GGUF metadata. Called by tokenizer.py only."""

import logging
import math
import re
from collections.abc import Callable, Set
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from ostrya.errors import ModelLoadError
from ostrya.gguf_header import Metadata, Value, read_first
from ostrya.text.formats import Stored, is_int, shown
from ostrya.text.pieces import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, byte_fallback, byte_level, sentence_pieces
from ostrya.text.pre_tokenizers import pre_tokenizer

log = logging.getLogger(__name__)

_BRACKETED = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_BARRED = re.compile(r"<([|\uff5c]).+\1>|\[\|.+\|\]")
"""How only control tokens are written."""


def from_gguf(path: Path, *, known: Set[str]) -> Stored:
    """The tokenizer inside a GGUF file, or in the first part of a split one. ModelLoadError if it has none, one of
    another kind, or one whose numbers cannot be. `known` are special tokens of files without types."""
    keys = _Keys(path, read_first(path).metadata)
    kind = keys.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        what = f"tokenizer model {shown(kind)} is not supported"
        raise ModelLoadError(f"{path}: {what}; supported: {', '.join(map(repr, _KINDS))}")
    tokens = keys.texts("tokenizer.ggml.tokens")
    try:
        backend, adds_bos = _KINDS[kind](keys, tokens, path, known)
    except ValueError as error:
        raise ModelLoadError(f"{path}: {error}") from error
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
    backend = byte_level(_ids_of(tokens), keys.merges(), pre)
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
            what = f"{len(value)} long" if isinstance(value, list) else shown(value)
            wanted = f"one number for each of {num_tokens} tokens is needed"
            raise ModelLoadError(f"{self._path}: tokenizer.ggml.token_type is {what}; {wanted}")
        for token_id, kind in enumerate(value):
            if not is_int(kind):
                raise self._error(f"tokenizer.ggml.token_type[{token_id}]", kind, "a whole number")
        return [kind for kind in value if is_int(kind)]

    def named_ids(self, num_tokens: int) -> tuple[int | None, ...]:
        """Begin of sequence, end of sequence, end of turn, end of message."""
        return tuple(self.token_id(name, num_tokens) for name in ("bos", "eos", "eot", "eom"))

    def token_id(self, name: str, num_tokens: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._metadata.get(key)
        if value is None or (is_int(value) and 0 <= value < num_tokens):
            return value
        raise self._error(key, value, f"a token id from 0 to {num_tokens - 1}")

    def _error(self, key: str, value: Value | None, wanted: str) -> ModelLoadError:
        what = f"{key} is {shown(value)}; it must be {wanted}"
        return ModelLoadError(f"{self._path}: {what}; correct it with gguf-new-metadata or convert the model again")


def _ids_of(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _types(keys: _Keys, tokens: list[str], path: Path, known: Set[str]) -> list[int]:
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
