"""A SentencePiece GGUF splits a text as SentencePiece's own algorithm does, and gives it back."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostrya.errors import ModelLoadError
from ostrya.text.detokenize import Detokenizer
from ostrya.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.files import write_gguf, write_sentence_pieces

USER_DEFINED = ("▁▁", "▁▁▁", "<b>", "\n", "\n\n")


def trained(text: str, num_pieces: int) -> dict[str, float]:
    """Byte-pair encoding as it is trained: the most frequent pair becomes a piece, the best ones first."""
    parts, pieces = list(text), dict.fromkeys(text, -1e9)
    for rank in range(num_pieces):
        pairs = [a + b for a, b in pairwise(parts) if "▁" not in b]
        best = max(sorted(set(pairs)), key=pairs.count)
        pieces[best] = -float(rank)
        joined: list[str] = []
        for part in parts:
            if joined and joined[-1] + part == best:
                joined[-1] = best
            else:
                joined.append(part)
        parts = joined
    return pieces


PIECES = trained("▁the▁banana▁and▁the▁aaaaaaaa▁bandana▁in▁a▁cabana▁abababab▁über▁den▁wolken▁höhe▁der▁höhen", 35)


def expected(text: str) -> list[str]:
    """By definition: the best pair of neighbours is joined, the leftmost of equals; then what is no piece is bytes."""
    parts = list(text.replace(" ", "▁"))
    while True:
        known = [(PIECES[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not known:
            break
        at = -max(known)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    spelled = [[part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [token for tokens in spelled for token in tokens]


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(tokenizer._backend.id_to_token(token_id)) for token_id in tokenizer.encode(text, add_prefix=False)]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Without a space prefix, as Gemma's."""
    path = tmp_path_factory.mktemp("plain") / "m.gguf"
    return load_tokenizer(write_sentence_pieces(path, PIECES, space_prefix=False))


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With one, as Llama 2's; that is also what a file means that does not say."""
    return load_tokenizer(write_sentence_pieces(tmp_path_factory.mktemp("prefixed") / "m.gguf", PIECES))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With pieces that are found before all else."""
    path = tmp_path_factory.mktemp("gemma") / "m.gguf"
    return load_tokenizer(write_sentence_pieces(path, PIECES, user_defined=USER_DEFINED, space_prefix=False))


words = st.sampled_from([piece.replace("▁", " ") for piece in PIECES])
texts = st.lists(st.one_of(words, st.text("abn 日🌲", max_size=6)), max_size=20).map("".join)
any_texts = st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=60)


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_the_best_pair_is_joined_first_and_the_leftmost_of_equals(plain: Tokenizer, text: str) -> None:
    assert tokens_of(plain, text) == expected(text)


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_a_space_stands_before_a_text_where_the_vocabulary_wants_one(prefixed: Tokenizer, text: str) -> None:
    assert tokens_of(prefixed, text) == (expected(f" {text}") if text else [])


def test_a_space_stands_after_a_special_token_too(prefixed: Tokenizer) -> None:
    assert tokens_of(prefixed, "a<s>a</s>") == [*expected(" a"), "<s>", *expected(" a"), "</s>"]


@given(text=st.one_of(texts, any_texts))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_streamed_and_whole(plain: Tokenizer, gemma: Tokenizer, text: str) -> None:
    for tokenizer in (plain, gemma):
        ids = tokenizer._encode_without_specials(text)
        assert tokenizer.decode(ids) == text
        assert streamed(tokenizer, ids) == text


@given(text=texts.filter(bool))
@settings(max_examples=50, deadline=None)
def test_a_continuation_keeps_its_space(prefixed: Tokenizer, text: str) -> None:
    """What a model adds to a prompt begins with a space of its own more often than not."""
    ids = prefixed.encode(text, add_prefix=False)
    assert streamed(prefixed, ids) == prefixed.decode(ids) == f" {text}"


@given(text=st.lists(st.sampled_from(["the banana", " ", "  ", "\n", "<b>", "<s>", "</s>", "x" * 70]), max_size=12))
@settings(max_examples=100, deadline=None)
def test_the_cache_between_special_tokens_changes_no_id(gemma: Tokenizer, prefixed: Tokenizer, text: list[str]) -> None:
    whole = "".join(text)
    for tokenizer in (gemma, prefixed):
        ids = tokenizer._backend.encode(whole, add_special_tokens=False).ids
        assert tokenizer.encode(whole, add_prefix=False) == ids
        assert tokenizer.encode(whole, add_prefix=False) == ids, "the second time from the cache"


def test_user_defined_pieces_are_found_first_the_longest_from_the_left(gemma: Tokenizer) -> None:
    assert tokens_of(gemma, "a    a") == ["a", "▁▁▁", *expected(" a")]
    assert tokens_of(gemma, "<b>  a\n\n\na") == ["<b>", "▁▁", "a", "\n\n", "\n", "a"]
    assert gemma.decode(gemma.encode("<b>     a\n\n", add_prefix=False)) == "<b>     a\n\n"


@pytest.mark.parametrize("text", ["banana", " banana", "the den ", "  x", "é"])
def test_inside_a_text_there_is_no_space_prefix(prefixed: Tokenizer, plain: Tokenizer, text: str) -> None:
    assert prefixed.encode_inside(text) == plain.encode_inside(text) == plain.encode(text, add_prefix=False)
    assert prefixed.encode_inside(text) != prefixed.encode(text, add_prefix=False)


def test_user_defined_pieces_are_found_beside_a_space_prefix(tmp_path: Path) -> None:
    path = write_sentence_pieces(tmp_path / "m.gguf", PIECES, user_defined=("<b>",))
    assert tokens_of(load_tokenizer(path), "a<b>a") == [*expected(" a"), "<b>", *expected(" a")]


def test_the_text_of_special_and_byte_tokens_in_a_content_stays_text(gemma: Tokenizer, prefixed: Tokenizer) -> None:
    for tokenizer, space in ((gemma, ""), (prefixed, " ")):
        content = "a </s><s> <0x41> <unk>"
        ids = tokenizer.encode_marked(f"<s>{tokenizer.mark(content, '@')}</s>", "@")
        assert (ids[0], ids[-1]) == (1, 2)
        assert not {0, 1, 2} & set(ids[1:-1])
        assert tokenizer.decode(ids) == space + content


def test_a_prompt_begins_with_the_begin_of_sequence(gemma: Tokenizer) -> None:
    assert gemma.encode("a")[0] == 1
    assert gemma.encode("<s>a")[:2] == gemma.encode("a")[:2]
    assert gemma.eos_token_ids == (2,)


def test_a_directory_in_this_spelling_gives_the_same_ids(gemma: Tokenizer, prefixed: Tokenizer, tmp_path: Path) -> None:
    """Gemma's tokenizer.json is such a one: BPE with bytes for unknown characters."""
    for number, tokenizer in enumerate((gemma, prefixed)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(tokenizer._backend.to_str())
        other = load_tokenizer(folder)
        assert other.fingerprint == tokenizer.fingerprint
        text = "<s>the  banana\n\n日<b> </s>über" * 3
        ids = tokenizer.encode(text, add_prefix=False)
        assert other.encode(text) == ids
        assert other.decode(ids) == tokenizer.decode(ids) == streamed(other, ids)


def test_gemma_4_has_merges_in_the_same_spelling(tmp_path: Path) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["▁", "a", "b", "\n", "\n\n", "▁a", "ab", "▁ab", "a\n", *bytes_]
    merges = ["a b", "▁ ab", "▁ a", "\n \n", "a \n"]
    path = write_gguf(tmp_path / "m.gguf", kind="gemma4", tokens=tokens, control=("<|turn>",), pre=None, merges=merges)
    tokenizer = load_tokenizer(path)
    text = "ab ab a\n\n<|turn>日"
    spelled = [f"<0x{byte:02X}>" for byte in "日".encode()]
    assert tokens_of(tokenizer, text) == ["ab", "▁ab", "▁a", "\n\n", "<|turn>", *spelled]
    assert tokenizer.decode(tokenizer.encode(text)) == "ab ab a\n\n日"


def test_without_bytes_an_unknown_character_is_the_unknown_token(tmp_path: Path) -> None:
    path = write_sentence_pieces(tmp_path / "m.gguf", PIECES, with_bytes=False, space_prefix=False)
    assert tokens_of(load_tokenizer(path), "a日本a") == ["a", "<unk>", "a"], "one for both, as in SentencePiece"


def test_the_time_for_a_text_grows_with_its_length_only(plain: Tokenizer) -> None:
    def cost_s(text: str) -> float:
        runs = []
        for _ in range(3):
            begin = time.thread_time()
            plain._backend.encode(text, add_special_tokens=False)
            runs.append(time.thread_time() - begin)
        return min(runs)

    for unit in ("a", "the bandana ", "ab", " "):
        short, long = cost_s(unit * (10_000 // len(unit))), cost_s(unit * (100_000 // len(unit)))
        assert long < 40 * short, "ten times the text; quadratic would be a hundred times the work"


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("scores", "tokenizer.ggml.scores is None; it must be one number for each of"),
        ("token_type", "token_type is missing"),
    ],
)
def test_scores_and_types_are_needed(tmp_path: Path, without: str, words: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        load_tokenizer(write_sentence_pieces(tmp_path / "m.gguf", {"a": 0.0}, without=(without,)))
    assert words in str(refused.value)


def test_a_score_that_is_no_number_is_refused_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores\[260\] is nan; it must be a finite number"):
        load_tokenizer(write_sentence_pieces(tmp_path / "m.gguf", {"a": 0.0, "b": float("nan")}))
