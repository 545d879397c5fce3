"""What a client sees of the tokens that arrive."""

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


def answer(*, stop: tuple[str, ...] = (), ending: frozenset[int] = frozenset({END})) -> Answer:
    return Answer(Detokenizer(TOKENIZER, stop=stop), request_id="r0", num_prompt_tokens=9, ending_token_ids=ending)


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
