"""What a client sees of the tokens that arrive."""

from dataclasses import replace

from ostrya.api.v1 import common_pb2, inference_pb2
from ostrya.router.answer import Answer
from ostrya.router.proxy import Part
from ostrya.router.types import WorkerId
from ostrya.text.detokenize import Detokenizer
from tests.fakes.tokenizer import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
GOING_ON = common_pb2.FINISH_REASON_UNSPECIFIED


def part(*token_ids: int, finish: common_pb2.FinishReason.ValueType = GOING_ON) -> Part:
    return Part(token_ids=token_ids, finish_reason=finish, cached_tokens=3, worker_id=WorkerId("w0"), decision_id="d0")


def scored(of: Part) -> Part:
    """With log probabilities that tell the tokens from each other."""
    return replace(of, logprobs=tuple(common_pb2.TokenLogprobs(logprob=-token_id) for token_id in of.token_ids))


def answer(
    *, stop: tuple[str, ...] = (), ending: frozenset[int] = frozenset({END}), min_tokens: int = 0, choice: int = 0
) -> Answer:
    return Answer(
        Detokenizer(TOKENIZER, stop=stop),
        request_id="r0",
        num_prompt_tokens=9,
        ending_token_ids=ending,
        min_tokens=min_tokens,
        choice=choice,
    )


def collect(to: Answer, *parts: Part) -> list[inference_pb2.GenerateResponse]:
    return [response for one in parts if (response := to.add(one)) is not None]


def test_tokens_without_showable_text_go_with_the_next_message() -> None:
    one, two = collect(answer(), part(*b"a\xc3"), part(0xA9), part(*b"\xf0\x9f"), part(0x8C))
    assert [(one.text, list(one.token_ids)), (two.text, list(two.token_ids))] == [("a", [97, 0xC3]), ("é", [0xA9])]


def test_every_message_says_where_it_comes_from_and_the_last_one_how_it_went() -> None:
    first, last = collect(answer(), part(*b"ab"), part(END, finish=STOP))
    assert (first.replica, first.decision_id, first.request_id) == ("w0", "d0", "r0")
    assert not first.HasField("usage")
    assert (last.text, list(last.token_ids), last.finish_reason) == ("", [END], STOP)
    assert last.usage == common_pb2.Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=3)


def test_an_answer_that_a_simulation_had_a_part_in_says_so() -> None:
    last = collect(answer(), replace(part(*b"a"), is_simulated=True), part(*b"b"), part(END, finish=STOP))[-1]
    assert last.usage.simulated
    assert not collect(answer(), part(*b"a"), part(END, finish=STOP))[-1].usage.simulated


def test_the_answer_ends_before_a_stop_string_and_counts_the_tokens_up_to_it() -> None:
    to = answer(stop=("END",))
    first, last = collect(to, part(*b"one E"), part(*b"ND two"))
    assert (first.text, last.text, last.finish_reason) == ("one ", "", STOP)
    assert bytes(first.token_ids) + bytes(last.token_ids) == b"one END"
    assert last.usage.completion_tokens == 7
    assert to.finished


def test_what_was_held_back_is_shown_when_the_answer_ends_otherwise() -> None:
    (last,) = collect(answer(stop=("END",)), part(*b"EN\xc3", finish=LENGTH))
    assert (last.text, last.finish_reason) == ("EN\N{REPLACEMENT CHARACTER}", LENGTH)


def test_a_stop_token_is_not_part_of_the_text() -> None:
    (last,) = collect(answer(ending=frozenset({ord("!")})), part(*b"hi!", finish=STOP))
    assert (last.text, list(last.token_ids)) == ("hi", list(b"hi!"))


def test_a_stop_token_in_the_middle_is_text_like_any_other() -> None:
    (last,) = collect(answer(ending=frozenset({ord("!")})), part(*b"h!i!", finish=LENGTH))
    assert last.text == "h!i!"


def test_log_probabilities_go_with_their_tokens_and_end_at_a_stop_string() -> None:
    prompt = (common_pb2.TokenLogprobs(logprob=-7),)
    first = replace(scored(part(*b"\xc3")), prompt_logprobs=prompt)
    one, two = collect(answer(stop=("END",)), first, scored(part(0xA9)), scored(part(*b"ENDING")))
    assert [-score.logprob for score in one.logprobs] == list(one.token_ids) == [0xC3, 0xA9]
    assert [-score.logprob for score in two.logprobs] == list(two.token_ids) == list(b"END")
    assert (list(one.prompt_logprobs), list(two.prompt_logprobs)) == (list(prompt), [])


def test_a_stop_string_that_is_complete_before_min_tokens_is_text() -> None:
    texts = [
        "".join(
            one.text for one in collect(answer(stop=("END",), min_tokens=number), part(*b"ENDING END", finish=LENGTH))
        )
        for number in (0, 2, 3, 9, 10)
    ]
    assert texts == ["", "", "ENDING ", "ENDING ", "ENDING END"]


def test_every_message_says_which_choice_it_is_a_part_of() -> None:
    assert [one.choice for one in collect(answer(choice=3), part(*b"a"), part(*b"b", finish=LENGTH))] == [3, 3]
