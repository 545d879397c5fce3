"""Streams of tokens become streams of whole characters, cut before the first stop string."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.text.detokenize import Detokenizer, StopMatcher
from ostrya.text.specials import SpecialTokens
from ostrya.text.tokenizer import Tokenizer

few = st.text(alphabet="abc", max_size=30)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


END, TURN = 256, 257


class Bytes:
    """Token ids are bytes, and two special tokens."""

    special_tokens = SpecialTokens(["<end>", "<turn>"])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b""

    def special_text(self, token_id: int) -> str:
        return {END: "<end>", TURN: "<turn>"}.get(token_id, "")


@given(raw=st.binary(max_size=60))
@settings(deadline=None)
def test_pieces_joined_equal_decoding_all_at_once(raw: bytes) -> None:
    stream = Detokenizer(Bytes())
    assert "".join([*map(stream.push, raw), stream.finish()]) == raw.decode("utf-8", "replace")


@given(text=st.text(max_size=40))
@settings(deadline=None)
def test_half_a_character_is_never_shown(text: str) -> None:
    stream = Detokenizer(Bytes())
    shown = ""
    for byte in text.encode():
        shown += stream.push(byte)
        assert text.startswith(shown)


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_stream_of_real_tokens_equals_the_library(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = Detokenizer(tokenizer)
    assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer._backend.decode(ids)


def first_cut(text: str, stop: list[str]) -> str | None:
    """By definition: before the stop string that is complete first, the longest of them; None without one."""
    for end in range(1, len(text) + 1):
        matches = [word for word in stop if text[:end].endswith(word)]
        if matches:
            return text[: end - len(max(matches, key=len))]
    return None


@given(text=few, stop=stops, cuts=st.lists(st.integers(0, 30)))
@settings(max_examples=300, deadline=None)
def test_the_text_is_cut_before_the_stop_string_that_is_complete_first(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stop)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown = "".join(matcher.push(text[a:b]) for a, b in itertools.pairwise(edges))
    cut = first_cut(text, stop)
    assert matcher.stopped is (cut is not None)
    assert (shown if cut is not None else shown + matcher.finish()) == (text if cut is None else cut)


@given(text=few, stop=stops)
@settings(deadline=None)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    for position, character in enumerate(text, start=1):
        shown += matcher.push(character)
        if matcher.stopped:
            return
        begins = (text[i:position] for i in range(position + 1))
        longest = next(tail for tail in begins if any(word.startswith(tail) and word != tail for word in stop))
        assert shown == text[: position - len(longest)]


def test_nothing_is_shown_after_a_stop_string() -> None:
    stream = Detokenizer(Bytes(), stop=("END",))
    assert "".join(map(stream.push, b"one END two")) == "one "
    assert stream.stopped
    assert stream.finish() == ""


def test_a_held_back_beginning_is_shown_at_the_end() -> None:
    stream = Detokenizer(Bytes(), stop=("END",))
    assert "".join(map(stream.push, b"one EN")) == "one "
    assert stream.finish() == "EN"


def test_a_stop_string_may_span_tokens_and_characters_of_several_bytes() -> None:
    stream = Detokenizer(Bytes(), stop=("é🌲",))
    assert "".join(map(stream.push, "café🌲!".encode())) == "caf"


@pytest.mark.parametrize(
    ("stop", "tokens", "shown", "stops"),
    [
        ("<end>", [*b"one", END, *b"two"], "one", True),
        ("<end>", [*b"one<end>two"], "one", True),
        ("<end>", [*b"one", TURN, *b"two"], "onetwo", False),
        ("<end>\n", [*b"one", END, *b"two", END, *b"\nthree"], "onetwo", True),
        ("one<turn>user", [*b"a one", TURN, *b"us", TURN, *b"one", TURN, *b"user"], "a oneus", True),
        ("<turn><end>", [*b"one", TURN, TURN, END], "one", True),
        ("turn", [*b"one", TURN, *b"two"], "onetwo", False),
        ("one two", [*b"one ", TURN, *b"two"], "", True),
        ("\u00e9", [0xC3, END, 0xA9], "", True),
    ],
)
def test_a_special_token_in_a_stop_string_is_that_token_and_no_part_of_the_text(
    stop: str, tokens: list[int], shown: str, stops: bool
) -> None:
    stream = Detokenizer(Bytes(), stop=(stop,))
    assert "".join([*map(stream.push, tokens), stream.finish()]) == shown
    assert stream.stopped is stops


def test_a_real_special_token_is_known_by_its_text(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer, stop=("<|im_end|>",))
    ids = tokenizer.encode("Hi<|im_start|> there<|im_end|>you")
    assert "".join(map(stream.push, ids)) == "Hi there"
    assert stream.stopped


def test_time_does_not_grow_with_the_answer() -> None:
    """A decoder that looks at everything again would take minutes for this, not a second."""
    stream = Detokenizer(Bytes(), stop=("a" * 255 + "b",))
    started = time.perf_counter()
    for _ in range(100_000):
        stream.push(ord("a"))
    assert time.perf_counter() - started < 5
