"""Backends of the two kinds of BPE: over bytes, and over characters with bytes for those that are unknown.

Where a file says how good a piece is and not which merges come first, merges are ordered by what they make:
SentencePiece gives each piece a score, tiktoken a rank, and both join the neighbours that make the best piece, the
leftmost of equal ones. Called by gguf_vocabulary.py and rank_files.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer, decoders, models, normalizers

from ostrya.text.pre_tokenizers import Pre

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Token types of GGUF and SentencePiece. Of the others, unused ones (5) come of no text, bytes (6) of no merge."""

_SPACE = "▁"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes-to-characters table, inverted: printable bytes stand for themselves, others for U+0100 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""Byte-level BPE writes a byte as a character."""
_SPELLING = {byte: ord(character) for character, byte in BYTE_OF.items()}


def spell(raw: bytes) -> str:
    """Bytes as byte-level BPE writes them."""
    return raw.decode("latin-1").translate(_SPELLING)


@contextmanager
def _fitting() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises no other
        raise ValueError(f"its merges do not fit its tokens: {str(error)[:200]!r}") from error


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], pre: Pre) -> Tokenizer:
    """BPE over bytes. ValueError for a merge of tokens that do not exist."""
    with _fitting():
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre.split()
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def merges_by_piece(order: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best piece first; `order` is smaller for better ones.

    Of pairs that make the same piece the longest left half comes first. Where two of them overlap in a text, as in a
    run of one character, it is the left one's: what stands left was joined before.
    """
    found = [
        (place, -cut, piece)
        for piece, place in order.items()
        for cut in range(1, len(piece))
        if piece[cut:] in order and piece[:cut] in order
    ]
    found.sort()
    return [(piece[:-cut], piece[-cut:]) for _, cut, piece in found]


def sentence_pieces(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    unknown: str | None,
    space_prefix: bool,
) -> Tokenizer:
    """SentencePiece's BPE: spaces as U+2581, bytes for characters without a piece, user-defined pieces first of all.

    `space_prefix` puts a space before each text that begins, or that follows a special token.
    """
    order = {token: -score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return byte_fallback(vocab, merges_by_piece(order), unknown=unknown, space_prefix=space_prefix)


def byte_fallback(
    vocab: dict[str, int], merges: list[tuple[str, str]], *, unknown: str | None, space_prefix: bool = False
) -> Tokenizer:
    """BPE in SentencePiece's spelling, wherever its merges come from. ValueError as in `byte_level`."""
    with _fitting():
        model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if space_prefix else spaces
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend
