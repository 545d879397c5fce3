"""Special tokens as text: where they stand, and how those that somebody typed are kept from being read as tokens.

A message's content is text, whatever it spells. Its template's text is not, and both come out of the template as one
string. So before it is rendered, a mark that nobody can guess is put into each special token that the content spells,
after its first character; what has the mark in it afterwards is content.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

_SLICE_CHARS = 1 << 16
"""Python's search keeps the interpreter to its end, here a millisecond or two."""


class SpecialTokens:
    """The texts of a tokenizer's special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(set(texts) - {""})
        self._max_chars = max(map(len, self._texts), default=0)
        self._beginnings = {text[:2] for text in self._texts}
        pattern = alternatives(self._texts)
        self._whole = re.compile(f"({pattern})", re.DOTALL)
        self._first = re.compile(f"(?={pattern}).", re.DOTALL)

    def split(self, text: str) -> list[str]:
        """Text and special tokens in turn, text first, as `re.split` gives them; the first and longest ones."""
        return self._whole.split(text) if self._texts else [text]

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where they stand: the first and longest ones, none over another."""
        return (found.span() for found in self._whole.finditer(text)) if self._texts else iter(())

    def marked(self, text: str, mark: str) -> str:
        """With `mark` after the first character of each, also where one stands in another. `text` itself if none does.

        For texts of any length, but not for an event loop.
        """
        if not any(beginning in text for beginning in self._beginnings):
            return text
        cuts = [0]
        for begin in range(0, len(text), _SLICE_CHARS):
            end = begin + _SLICE_CHARS
            found = self._first.finditer(text, begin, end + self._max_chars)
            cuts += [one.end() for one in found if one.start() < end]
        if len(cuts) == 1:
            return text
        return mark.join(text[a:b] for a, b in pairwise([*cuts, len(text)]))


def alternatives(words: Iterable[str]) -> str:
    """A regular expression for any of the words, the longest possible, that does not try them one by one."""
    root = _Node()
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, _Node())
        node.is_end = True
    return root.pattern()


class _Node(dict[str, "_Node"]):
    """What may follow a beginning."""

    is_end = False

    def pattern(self) -> str:
        tail, node = "", self
        while len(node) == 1 and not node.is_end:
            ((character, node),) = node.items()
            tail += re.escape(character)
        if not node:
            return tail
        branches = "|".join(re.escape(character) + child.pattern() for character, child in node.items())
        return f"{tail}(?:{branches})" + ("?" if node.is_end else "")
