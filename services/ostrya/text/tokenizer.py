"""Text to token ids, and token ids to bytes: one tokenizer, whatever file it came from.

Used by the router (all of it) and by a worker's command (the fingerprint). Safe to call from several threads.
"""

import hashlib
import json
import re
import struct
from collections.abc import Collection, Iterable
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ostrya.errors import ModelLoadError
from ostrya.text.formats import JsonValue, Stored, from_directory
from ostrya.text.gguf_vocabulary import from_gguf
from ostrya.text.pieces import BYTE_OF
from ostrya.text.segments import SegmentCache
from ostrya.text.specials import SpecialTokens
from ostrya.text.turns import ENDS, ending_ids

_SLICE_CHARS, _OVERLAP_CHARS = 1 << 14, 1 << 10
"""A long text is looked at in slices, which go over one another by more than a special token is long."""


def load_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a .gguf file or of a Hugging Face directory.

    ModelLoadError if it cannot be read or is of an unsupported kind.
    """
    return Tokenizer(from_directory(path) if path.is_dir() else from_gguf(path, known=ENDS))


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, stored: Stored) -> None:
        description = json.loads(stored.backend.to_str())
        self._backend = stored.backend
        self._prefix_ids = stored.prefix_ids
        self._added: dict[int, AddedToken] = stored.backend.get_added_tokens_decoder()
        self._specials = {token.content: id for id, token in self._added.items() if token.special}
        self._special_ids = frozenset(self._specials.values())
        self.special_tokens = SpecialTokens(self._specials)
        self._is_rewritten = description["normalizer"] is not None and any(
            token.normalized for token in self._added.values() if token.special
        )
        """Whether a text that spells no special token may become one that does."""
        self._without_specials, self._own_ids = _without_specials(stored.backend, self._added)
        self._byte_level = _is_byte_level(description["decoder"])
        self._bytes: dict[int, bytes] = {}
        cuts = _cuts(description, self._added.values())
        self._segments = SegmentCache(self._encode_plain, cuts) if cuts is not None else None
        self.vocab_size = stored.vocab_size
        self.eos_token_ids = ending_ids(stored)
        """What ends a turn, for the text side and the engine alike."""
        self.chat_template = stored.chat_template
        self.bos_token = stored.bos_token
        self.eos_token = stored.eos_token
        self.fingerprint = _fingerprint(description)
        """SHA-256, hex, of what turns text into ids: vocabulary, merges, splitting, special tokens."""

    def encode(self, text: str, *, add_prefix: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids.

        `add_prefix` puts the model's begin-of-sequence token first, where it has one and the text does not begin with
        it already; a chat template brings its own.
        """
        ids = self._segments.encode(text) if self._segments is not None else self._encode_plain(text)
        has_prefix = not add_prefix or tuple(ids[: len(self._prefix_ids)]) == self._prefix_ids
        return ids if has_prefix else [*self._prefix_ids, *ids]

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a text that others precede: without the space that some vocabularies put before the first."""
        line, ids = self.encode("\n", add_prefix=False), self.encode(f"\n{text}", add_prefix=False)
        # A line end that became one with the text says nothing of it.
        return ids[len(line) :] if ids[: len(line)] == line else self.encode(text, add_prefix=False)

    def mark(self, content: str, mark: str) -> str:
        """A message's content, for a template, with `mark` in all that would become a special token.

        Not for an event loop: it looks at all of it.
        """
        if not self._is_rewritten:
            return self.special_tokens.marked(content, mark)
        inside: set[int] = set()
        for begin in range(0, len(content), _SLICE_CHARS):
            piece = content[begin : begin + _SLICE_CHARS + _OVERLAP_CHARS]
            encoding = self._backend.encode_batch([piece], add_special_tokens=False)[0]
            for id, (first, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if id in self._special_ids:
                    inside.update(range(begin + first, begin + end))
        return "".join(char + mark if at in inside else char for at, char in enumerate(content)) if inside else content

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of what a template made of marked contents: special tokens with the mark in them are text."""
        ids: list[int] = []
        begin = 0
        for start, end in self.special_tokens.spans(text):
            if not text.startswith(mark, end):  # a special token of one character has its mark behind it
                ids += self._encode_content(text[begin:start], mark)
                ids.append(self._specials[text[start:end]])
                begin = end
        return ids + self._encode_content(text[begin:], mark)

    def _encode_content(self, piece: str, mark: str) -> list[int]:
        if mark not in piece:
            return self.encode(piece, add_prefix=False) if piece else []
        ids = self._encode_without_specials(piece.replace(mark, ""))
        if not self._special_ids.isdisjoint(ids):
            # The model itself knows the text of a special token: then not as a whole.
            return [id for part in piece.split(mark) if part for id in self._encode_without_specials(part)]
        return ids

    def _encode_without_specials(self, text: str) -> list[int]:
        ids = self._without_specials.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [self._own_ids.get(id, id) for id in ids] if self._own_ids else ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text: none for a special token, perhaps a part of a character for others."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def vocabulary(self) -> list[bytes]:
        """token_bytes of every token. A third of a second for 49,152 of them."""
        return [self._find_bytes(token_id) for token_id in range(self.vocab_size)]

    def special_text(self, token_id: int) -> str:
        """How a special token is written; empty for any other."""
        return self._added[token_id].content if token_id in self._special_ids else ""

    def _find_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            if added.special:
                return b""
            return added.content.encode() if self._byte_level else _fallback_bytes(added.content)
        piece = self._backend.id_to_token(token_id) or ""
        return _byte_level_bytes(piece) if self._byte_level else _fallback_bytes(piece)

    def _encode_plain(self, text: str) -> list[int]:
        # `encode` holds the interpreter lock to its end, which for a long text stops every other stream; this does not.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _without_specials(backend: Backend, added: dict[int, AddedToken]) -> tuple[Backend, dict[int, int]]:
    """The same tokenizer without its special tokens, sharing all that is large, and {its id: the right id} where its
    other added tokens got other ids."""
    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    others = {id: token for id, token in added.items() if not token.special}
    plain.add_tokens(list(others.values()))
    own = {plain.token_to_id(token.content): id for id, token in others.items()}
    return plain, {plain_id: id for plain_id, id in own.items() if plain_id is not None and plain_id != id}


def _fingerprint(description: dict[str, JsonValue]) -> str:
    model = description["model"]
    if not isinstance(model, dict):
        raise ModelLoadError("the tokenizer has no model")
    parts = [model, *(description[name] for name in ("normalizer", "pre_tokenizer", "added_tokens"))]
    digest = hashlib.sha256()
    for part in parts:
        raw = json.dumps(part, sort_keys=True, separators=(",", ":")).encode()
        digest.update(struct.pack("<Q", len(raw)) + raw)
    return digest.hexdigest()


def _types(part: JsonValue) -> set[str]:
    """The `type` of a pipeline stage and of the stages inside it."""
    if isinstance(part, list):
        return set().union(*map(_types, part))
    if not isinstance(part, dict):
        return set()
    return {str(part.get("type"))}.union(*(_types(inner) for inner in part.values()))


def _is_byte_level(decoder: JsonValue) -> bool:
    found = _types(decoder)
    if "ByteLevel" not in found and "ByteFallback" not in found:
        raise ModelLoadError(f"token decoder {decoder!r} is not supported; supported: ByteLevel, ByteFallback")
    return "ByteLevel" in found


def _cuts(description: dict[str, JsonValue], added: Collection[AddedToken]) -> Collection[AddedToken] | None:
    """The added tokens between which a text may be encoded piecewise; None if something looks across them.

    The library finds those that are not normalized first, and normalizes and splits what is between them on its own.
    """
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    if "Metaspace" in _types(description["pre_tokenizer"]):  # it may treat a text's beginning differently
        return None
    first = [token for token in added if not token.normalized]
    return first or (added if description["normalizer"] is None else ())


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()


_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _fallback_bytes(piece: str) -> bytes:
    """SentencePiece's spelling: <0xE2> is a byte, U+2581 a space."""
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()
