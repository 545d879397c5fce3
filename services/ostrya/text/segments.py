"""A prefix token cache: a growing chat re-encodes only its newest turn.

Special tokens are matched before anything else happens to a text, so what stands between them encodes on its own.
tokenizer.py decides for which tokenizers that is exact.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping

from tokenizers import AddedToken

from ostrya.text.specials import alternatives

MIN_SEGMENT_CHARS = 64
"""Shorter ones are encoded again: the look-up would cost as much."""

MAX_CACHED_CHARS = 16 << 20
"""Some 50 MB with the ids: thousands of long chats."""


class SegmentCache:
    """Encodes texts piecewise between special tokens, keeping the pieces' ids; least recently used go first."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        added: Mapping[int, AddedToken],
        *,
        max_chars: int = MAX_CACHED_CHARS,
    ) -> None:
        self._encode = encode
        self._ids = {token.content: token_id for token_id, token in added.items()}
        self._pattern = re.compile(f"({alternatives(self._ids)})") if self._ids else None
        self._max_chars = max_chars
        self._cached: OrderedDict[str, array[int]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The same ids as encoding `text` in one go."""
        if self._pattern is None or len(text) < MIN_SEGMENT_CHARS:
            return self._encode(text)
        ids: list[int] = []
        for position, piece in enumerate(self._pattern.split(text)):
            if position % 2:
                ids.append(self._ids[piece])
            elif len(piece) < MIN_SEGMENT_CHARS:
                ids += self._encode(piece) if piece else ()
            else:
                ids += self._segment(piece)
        return ids

    def _segment(self, piece: str) -> "array[int]":
        with self._lock:
            if piece in self._cached:
                self._cached.move_to_end(piece)
                return self._cached[piece]
        ids = array("I", self._encode(piece))
        with self._lock:
            if piece not in self._cached and len(piece) <= self._max_chars:
                self._cached[piece] = ids
                self._num_chars += len(piece)
            while self._num_chars > self._max_chars:
                self._num_chars -= len(self._cached.popitem(last=False)[0])
        return ids
