"""A stream of tokens as a stream of text: whole characters only, cut before the first stop string.

One Detokenizer a request, used by router/proxy.py. Both halves take constant time a byte, however long the answer gets.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from ostrya.text.specials import SpecialTokens

Symbol: TypeAlias = "str | tuple[str]"
"""What stop strings are made of: a character, or a special token by its text, which is no part of the answer's."""


class HasTokens(Protocol):
    """What is needed of a tokenizer."""

    special_tokens: SpecialTokens

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text."""
        ...

    def special_text(self, token_id: int) -> str:
        """How a special token is written; empty for any other."""
        ...


class Detokenizer:
    """Turns token ids into the text that may be shown so far."""

    def __init__(self, tokenizer: HasTokens, *, stop: Sequence[str] = ()) -> None:
        """A special token's text in a stop string stands for that token, and for its characters."""
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [tokenizer.special_tokens.split(text) for text in stop]
        with_tokens = [_symbols(texts) for texts in pieces if len(texts) > 1]
        self._watches_tokens = bool(with_tokens)
        self._matcher = StopMatcher([*stop, *with_tokens]) if stop else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come; nothing after it is shown."""
        return self._matcher is not None and self._matcher.stopped

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """What this token makes showable; "" while a character or a possible stop string is incomplete. A stop string
        that this token completes is text like any other unless it `may_stop`."""
        if self._matcher is not None and self._watches_tokens and (special := self._tokenizer.special_text(token_id)):
            return self._matcher.push([(special,)], may_stop=may_stop)
        return self._match(self._characters.decode(self._tokenizer.token_bytes(token_id)), may_stop=may_stop)

    def finish(self) -> str:
        """What was held back, at the end of an answer without a stop string; half a character becomes U+FFFD."""
        text = self._match(self._characters.decode(b"", final=True))
        return text if self._matcher is None else text + self._matcher.finish()

    def _match(self, text: str, *, may_stop: bool = True) -> str:
        return text if self._matcher is None else self._matcher.push(text, may_stop=may_stop)


def _symbols(pieces: Sequence[str]) -> list[Symbol]:
    """Of text and special tokens in turn."""
    symbols: list[Symbol] = []
    for position, piece in enumerate(pieces):
        symbols += [(piece,)] if position % 2 else piece
    return symbols


class StopMatcher:
    """Finds the stop string that is complete first, and holds back only what could still become one.

    An Aho-Corasick automaton (Aho and Corasick 1975): the depth of its state is exactly the length of the longest
    suffix that begins a stop string. How the text is cut into pushes changes nothing.
    """

    def __init__(self, stop: Iterable[Sequence[Symbol]]) -> None:
        self._next: list[dict[Symbol, int]] = [{}]
        self._depth = [0]
        self._match = [0]
        """Length of the longest stop string that ends in this state."""
        for word in stop:
            self._insert(word)
        self._fail = self._failures()
        self._state = 0
        self._held: list[Symbol] = []
        self.stopped = False

    def _insert(self, word: Sequence[Symbol]) -> None:
        state = 0
        for character in word:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][character]
        self._match[state] = len(word)

    def _failures(self) -> list[int]:
        """For each state the longest proper suffix of it that is a state; fills in the matches that end there too."""
        fail = [0] * len(self._next)
        for state in sorted(range(len(self._next)), key=self._depth.__getitem__):
            for character, child in self._next[state].items():
                if state:
                    fallback = fail[state]
                    while fallback and character not in self._next[fallback]:
                        fallback = fail[fallback]
                    fail[child] = self._next[fallback].get(character, 0)
                self._match[child] = self._match[child] or self._match[fail[child]]
        return fail

    def push(self, text: Sequence[Symbol], *, may_stop: bool = True) -> str:
        """The text that is certainly before any stop string; those complete where they may not stop are none."""
        if self.stopped:
            return ""
        shown = [*self._held, *text]
        for position, character in enumerate(text, start=len(self._held) + 1):
            while self._state and character not in self._next[self._state]:
                self._state = self._fail[self._state]
            self._state = self._next[self._state].get(character, 0)
            if may_stop and self._match[self._state]:
                self.stopped, self._held = True, []
                return _characters(shown[: position - self._match[self._state]])
        keep = len(shown) - self._depth[self._state]
        self._held = shown[keep:]
        return _characters(shown[:keep])

    def finish(self) -> str:
        """What is still held back: no stop string came of it."""
        held, self._held = self._held, []
        return _characters(held)


def _characters(symbols: Iterable[Symbol]) -> str:
    return "".join(symbol for symbol in symbols if isinstance(symbol, str))
