"""A prefix token cache: a growing chat re-encodes only its newest turn.

Special tokens are matched before anything else happens to a text, so what stands between them encodes on its own.
tokenizer.py decides for which tokenizers that is exact.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection

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
        added: Collection[AddedToken],
        *,
        max_chars: int = MAX_CACHED_CHARS,
    ) -> None:
        self._encode = encode
        words = [token.content for token in added]
        self._pattern = re.compile(f"({alternatives(words)})") if words else None
        self._max_chars = max_chars
        self._cached: OrderedDict[str, array[int]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The same ids as encoding `text` in one go."""
        if self._pattern is None or len(text) < MIN_SEGMENT_CHARS:
            return self._encode(text)
        ids: list[int] = []
        short: list[str] = []
        for position, piece in enumerate(self._pattern.split(text)):
            if position % 2 or len(piece) < MIN_SEGMENT_CHARS:
                short.append(piece)
            else:
                ids += self._encode("".join(short))
                ids += self._segment(piece)
                short.clear()
        return ids + self._encode("".join(short))

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
