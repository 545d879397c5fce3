"""Grammars as bit masks over the vocabulary, by llguidance: what may come next, token by token. No torch.

Compiling takes from a fraction of a millisecond to a second: engine/compiling.py does it off the step loop. Limits of
llguidance itself (its fuel) bound what one grammar may cost, then and at every token.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ostrya.engine.plan import I32
from ostrya.engine.types import Grammar
from ostrya.errors import InvalidRequest

FIELD = "sampling.structured"
_MAX_KEPT = 64
"""Compiled grammars; applications send few, again and again."""
_MAX_REASON_CHARS = 400
_MAX_PARTS = 512
"""Of a schema that are looked at for the place of a mistake: a third of a millisecond each."""
_WANTED = {
    "json_schema": "a JSON schema that llguidance supports",
    "regex": "a regular expression in the syntax of Rust's regex crate, without look-around",
    "choice": "strings",
    "lark": "a Lark grammar with a rule `start`",
}


class Matcher:
    """Where one output stands in its grammar."""

    def __init__(self, inner: LLMatcher, *, num_words: int) -> None:
        self._inner = inner
        self.num_words = num_words
        """Of a mask: 32 tokens each."""

    def fill(self, words_W: I32) -> None:
        """Bit t % 32 of word t // 32: whether token t may come next. With nothing else to come, an end of sequence."""
        self._inner.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)

    def consume(self, token_id: int) -> None:
        """The output has one token more."""
        self._inner.consume_token(token_id)

    @property
    def is_over(self) -> bool:
        """Nothing more can come: the output is complete, or has failed."""
        return self._inner.is_stopped()

    @property
    def has_failed(self) -> bool:
        """The grammar met a limit, or a token that it does not allow."""
        return self._inner.is_error()


class Grammars:
    """Compiles grammars for one vocabulary. compile() may be called from several threads."""

    def __init__(self, vocabulary: Sequence[bytes], *, eos_token_ids: Sequence[int]) -> None:
        """`vocabulary`: the bytes of each token, none for special tokens. Takes a sixth of a second for 49,152 tokens
        and holds the interpreter lock."""
        greedy = _Greedy(vocabulary, eos_token_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(greedy), n_vocab=len(vocabulary), eos_token=list(eos_token_ids) or None
        )
        greedy.tokenizer = self._tokenizer
        self._num_words = -(-len(vocabulary) // 32)
        self._limits = LLParserLimits(verbose_errors=False)
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar, *, output: Sequence[int] = ()) -> Matcher:
        """A matcher that stands after `output`. InvalidRequest that names the place where the grammar is wrong."""
        inner = self._compiled(grammar).deep_copy()
        if not inner.consume_tokens(list(output)):
            raise InvalidRequest(FIELD, "another form than the output so far has", "the form of the whole answer")
        return Matcher(inner, num_words=self._num_words)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
        try:
            inner = self._matcher(_source(grammar))
        except ValueError as error:
            raise _refusal(grammar, str(error)) from error
        if inner.is_error():
            raise self._located(grammar, inner.get_error())
        inner.compute_bitmask()  # the first is the slowest
        with self._lock:
            self._kept[grammar] = inner
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return inner

    def _matcher(self, source: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)

    def _located(self, grammar: Grammar, reason: str) -> InvalidRequest:
        """Of a schema llguidance says what is wrong and not where: in the innermost part that is wrong by itself."""
        if grammar.kind == "json_schema":
            parts = islice(_parts(json.loads(grammar.text)), _MAX_PARTS)
            for place, part in sorted(parts, key=lambda one: one[0].count("/"), reverse=True):
                if self._matcher(LLMatcher.grammar_from_json_schema(part)).get_error() == reason:
                    return _refusal(grammar, f"{reason} (at {place or 'its root'})")
        return _refusal(grammar, reason)


class _Greedy:
    """What llguidance wants to know of a tokenizer. Text that a grammar forces is split into the longest tokens there
    are, which a model reads as well as its own splitting of the same words, nearly always the same."""

    bos_token_id: None = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self.tokens = list(vocabulary)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        self.tokenizer: LLTokenizer | None = None
        """Known once it is made."""

    def __call__(self, text: str | bytes) -> list[int]:
        words = text.decode() if isinstance(text, bytes) else text
        return [] if self.tokenizer is None else self.tokenizer.greedy_tokenize(words)


def _source(grammar: Grammar) -> str:
    """For llguidance. ValueError if it cannot be read."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(_checked_json(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text))))


def _checked_json(text: str) -> str:
    """llguidance would count columns from a beginning that the user does not know."""
    try:
        json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text


def _parts(node: object, place: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Every object of a schema with its JSON pointer."""
    if isinstance(node, dict):
        yield place, node
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in inner:
        yield from _parts(child, f"{place}/{key}")


def _refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    words = " ".join(reason.split())
    shown = words if len(words) <= _MAX_REASON_CHARS else f"{words[:_MAX_REASON_CHARS]}..."
    return InvalidRequest(f"{FIELD}.{grammar.kind}", f"not usable: {shown}", _WANTED[grammar.kind])
