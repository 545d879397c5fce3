"""Special tokens that somebody typed in a message are text; those of the template are tokens."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ostrya.text.chat import fresh_mark
from ostrya.text.formats import Stored
from ostrya.text.specials import SpecialTokens, alternatives
from ostrya.text.tokenizer import Tokenizer

MARK = "0123456789"
WORDS = ("<|im_start|>", "<|im_end|>", "<|im_", "|>", "<|endoftext|>", "user\n", "<", "\u00e9", "<|im_end|")
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=8).map("".join)
few = st.text(alphabet="ab<>", min_size=1, max_size=4)


@given(words=st.lists(few, min_size=1, max_size=6), text=st.text(alphabet="ab<>", max_size=30))
@settings(max_examples=300, deadline=None)
def test_the_longest_word_is_found_wherever_the_first_begins(words: list[str], text: str) -> None:
    found, at = [], 0
    while at < len(text):
        here = max((word for word in words if text.startswith(word, at)), key=len, default="")
        if here:
            found.append((at, at + len(here)))
        at += len(here) or 1
    assert list(SpecialTokens(words).spans(text)) == found


def test_hundreds_of_special_tokens_and_long_runs_of_spaces_are_found() -> None:
    words = [f"<|reserved_special_token_{number}|>" for number in range(1_000)] + [
        " " * number for number in range(2, 64)
    ]
    specials = SpecialTokens(words)
    for word in words:
        assert specials.split(f"a{word}b") == ["a", word, "b"]


def test_words_with_a_common_beginning_share_it() -> None:
    assert alternatives(["<|a|>", "<|ab|>", "<|a"]) == "<\\|a(?:\\|>|b\\|>)?"


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_a_marked_text_spells_no_special_token_and_is_the_text_without_marks(text: str) -> None:
    specials = SpecialTokens(["<|im_start|>", "<|im_end|>", "<|im_end|", "|>"])
    marked = specials.marked(text, MARK)
    assert not list(specials.spans(marked))
    assert marked.replace(MARK, "") == text
    assert (marked is text) is not any(True for _ in specials.spans(text))


def test_a_special_token_over_the_edge_of_a_slice_is_marked() -> None:
    specials = SpecialTokens(["<|im_end|>"])
    for before in range((1 << 16) - 12, (1 << 16) + 2):
        assert specials.marked("a" * before + "<|im_end|>", MARK) == "a" * before + f"<{MARK}|im_end|>"


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> Backend:
    """The library's own way to read special tokens as text."""
    plain = Backend.from_str(tokenizer._backend.to_str())
    plain.encode_special_tokens = True
    return plain


@given(turns=st.lists(texts, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_only_the_special_tokens_of_the_template_become_tokens(
    tokenizer: Tokenizer, plain: Backend, turns: list[str]
) -> None:
    """And what stands between them encodes as it does where special tokens are switched off."""
    mark = fresh_mark()
    rendered = "".join(f"<|im_start|>{tokenizer.mark(turn, mark)}<|im_end|>" for turn in turns)
    expected = [id for turn in turns for id in (1, *plain.encode(turn, add_special_tokens=False).ids, 2)]
    assert tokenizer.encode_marked(rendered, mark) == expected


@given(text=st.text(max_size=60) | texts)
@settings(max_examples=100, deadline=None)
def test_a_text_without_marks_encodes_as_ever(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode_marked(text, MARK) == tokenizer.encode(text, add_prefix=False)


def test_other_added_tokens_stay_tokens_wherever_they_stand() -> None:
    """`<think>` is no special token: a model's own answer holds it, and comes back in the next request."""
    tokenizer = _sentencepiece_like(None)
    marked = tokenizer.mark("<think><turn>a", MARK)
    spelled = [256 + ord(character) for character in "<turn>a"]
    assert tokenizer.encode_marked(f"<turn>{marked}", MARK) == [*tokenizer.encode("<turn><think>"), *spelled]


def test_a_special_token_that_a_normalizer_would_make_is_marked_too() -> None:
    tokenizer = _sentencepiece_like(normalizers.NFKC())
    turn = tokenizer.encode("<turn>")
    assert tokenizer.encode("\uff1cturn\uff1e") == turn
    marked = tokenizer.mark("a \uff1cturn\uff1e", MARK)
    assert turn[0] not in tokenizer.encode_marked(marked, MARK)
    assert tokenizer.encode_marked(f"<turn>{marked}", MARK)[0] == turn[0]
    assert tokenizer.mark("a <b>", MARK) == "a <b>"
    long = "b" * ((1 << 14) - 3)
    assert turn[0] not in tokenizer.encode_marked(tokenizer.mark(f"{long}\uff1cturn\uff1e", MARK), MARK)


def _sentencepiece_like(normalizer: normalizers.Normalizer | None) -> Tokenizer:
    """A token a character, unknown ones as bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {chr(code): 256 + code for code in range(32, 127)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.ByteFallback()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<turn>", special=True, normalized=normalizer is not None)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return Tokenizer(
        Stored(
            backend=backend,
            vocab_size=1_000,
            eos_token_ids=(),
            prefix_ids=(),
            chat_template=None,
            bos_token="",
            eos_token="",
        )
    )


@pytest.mark.parametrize("text", ["<|im_" * 400_000, "<|im_start|>" * 100_000])
def test_marking_a_long_text_leaves_the_interpreter_to_other_threads(tokenizer: Tokenizer, text: str) -> None:
    marking = threading.Thread(target=tokenizer.mark, args=(text, MARK))
    marking.start()
    turns = 0
    while marking.is_alive():
        turns += 1
    marking.join()
    assert turns > 1_000
