"""What is refused, and how it is said; what reaches a worker."""

import math
from array import array

import pytest

from ostrya.api.v1 import common_pb2, inference_pb2, worker_pb2
from ostrya.errors import InvalidRequest, UnknownModel
from ostrya.router import convert
from ostrya.text import chat

LIMITS = convert.Limits(context_tokens=100, vocab_size=50)
BOUNDS = convert.Bounds(max_messages=3, max_prompt_bytes=1_000)
Request = inference_pb2.GenerateRequest
Params = common_pb2.SamplingParams
Chat = inference_pb2.ChatMessage


def asked(request: Request) -> convert.Asked:
    convert.refuse_giant(request, bounds=BOUNDS, limits=LIMITS)
    return convert.asked(request, model="tiny", bounds=BOUNDS, limits=LIMITS, draw_seed=lambda: 77)


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (Request(), "prompt", ("nothing", "text, messages, token_ids")),
        (Request(text=""), "text", ("empty",)),
        (Request(text="a", token_ids=[1]), "prompt", ("text and token_ids", "one of")),
        (Request(text="", messages=[Chat(role="user")]), "prompt", ("text and messages",)),
        (Request(messages=[Chat(role="user"), Chat(role="robot")]), "messages[1].role", ("'robot'", "developer")),
        (Request(text="a", continue_final_message=True), "continue_final_message", ("without messages",)),
        (Request(token_ids=[1], continue_final_message=True), "continue_final_message", ("without messages",)),
        (
            Request(messages=[Chat(role="user", content="a")], continue_final_message=True),
            "continue_final_message",
            ("'user'", "'assistant'"),
        ),
        (Request(token_ids=[1, 50]), "token_ids[1]", ("50", "0 to 49")),
        (Request(text="a", sampling=Params(temperature=-0.5)), "sampling.temperature", ("-0.5", "[0, 100]")),
        (Request(text="a", sampling=Params(temperature=101)), "sampling.temperature", ("101",)),
        (Request(text="a", sampling=Params(temperature=math.nan)), "sampling.temperature", ("nan",)),
        (Request(text="a", sampling=Params(temperature=math.inf)), "sampling.temperature", ("inf",)),
        (Request(text="a", sampling=Params(top_p=0)), "sampling.top_p", ("is 0;", "(0, 1]")),
        (Request(text="a", sampling=Params(top_p=1.5)), "sampling.top_p", ("1.5",)),
        (Request(text="a", sampling=Params(top_p=math.nan)), "sampling.top_p", ("nan",)),
        (Request(text="a", sampling=Params(top_k=-1)), "sampling.top_k", ("-1",)),
        (Request(text="a", sampling=Params(max_tokens=0)), "sampling.max_tokens", ("is 0;", "1 or more")),
        (Request(text="a", sampling=Params(max_tokens=-5)), "sampling.max_tokens", ("-5",)),
        (Request(text="a", sampling=Params(stop_token_ids=[3, 99])), "sampling.stop_token_ids[1]", ("99", "49")),
        (Request(text="a", priority=-101), "priority", ("-101", "-100 to 100")),
        (Request(text="a", bad_words=["x", ""]), "bad_words[1]", ("0 bytes", "1 to 256")),
        (Request(text="a", bad_words=["x"] * 129), "bad_words", ("129 words", "at most 128")),
        (Request(text="a", n=17), "n", ("17", "1 to 16")),
        (Request(text="a", stop=["x"] * 17), "stop", ("17", "16")),
        (Request(text="a", stop=["x", ""]), "stop[1]", ("0 bytes", "1 to 256")),
        (Request(text="a", stop=["é" * 129]), "stop[0]", ("258 bytes",)),
        (Request(text="é" * 501), "text", ("1002 bytes", "at most 1000 bytes")),
        (Request(messages=[Chat(role="user", content="é" * 251)] * 2), "messages", ("1004 bytes", "1000")),
        (Request(messages=[Chat(role="user", content="a")] * 4), "messages", ("4 messages", "at most 3")),
        (Request(token_ids=[1] * 251), "token_ids", ("251 ids", "at most 250")),
        (Request(token_ids=[1] * 100), "prompt", ("100 tokens", "at most 99")),
        (Request(text="a", sampling=Params(stop_token_ids=[1] * 1025)), "sampling.stop_token_ids", ("1025", "1024")),
        (Request(text="a", model="m" * 257), "model", ("257 characters", "at most 256")),
    ],
)
def test_a_bad_field_is_refused_with_its_name_value_and_range(
    request_: Request, field: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(request_)
    assert refused.value.field == field
    assert all(word in str(refused.value) for word in (field, *words))


def test_an_unknown_model_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(UnknownModel, match=r"'gpt-5'.*tiny"):
        asked(Request(text="a", model="gpt-5"))


def test_absent_fields_stay_absent_and_only_the_seed_is_drawn() -> None:
    sampling = asked(Request(text="a", model="tiny")).sampling
    assert sampling == convert.Sampling(
        temperature=None, top_k=None, top_p=None, seed=77, max_tokens=None, stop_token_ids=(), ignore_eos=None
    )


def test_zero_is_not_absent() -> None:
    given = Params(temperature=0, top_k=0, seed=0, ignore_eos=False)
    sampling = asked(Request(text="a", sampling=given)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.ignore_eos) == (0, 0, 0, False)


def test_each_kind_of_prompt_arrives_typed() -> None:
    assert asked(Request(text="a")).prompt == "a"
    hello = chat.Chat(messages=(chat.Message(role="user", content="b"),))
    assert asked(Request(messages=[Chat(role="user", content="b")])).prompt == hello
    assert asked(Request(token_ids=[3, 4])).prompt == array("I", [3, 4])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_each_role_of_a_conversation_is_taken(role: str) -> None:
    messages = [Chat(role=role, content="a")]
    expected = chat.Chat(messages=(chat.Message(role=role, content="a"),))
    assert asked(Request(messages=messages)).prompt == expected
    assert (
        convert.text_prompt(inference_pb2.TokenizeRequest(messages=messages), model="tiny", bounds=BOUNDS) == expected
    )


def test_a_begun_answer_stays_open_when_asked_to() -> None:
    messages = [Chat(role="assistant", content="a")]
    expected = chat.Chat(messages=(chat.Message(role="assistant", content="a"),), continue_final_message=True)
    assert asked(Request(messages=messages, continue_final_message=True)).prompt == expected
    request = inference_pb2.TokenizeRequest(messages=messages, continue_final_message=True)
    assert convert.text_prompt(request, model="tiny", bounds=BOUNDS) == expected


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "words"),
    [
        (0, None, ("0 tokens", "at least 1")),
        (100, None, ("100 tokens", "99")),
        (101, 1, ("101 tokens", "100")),
        (60, 41, ("41", "60", "at most 40", "100")),
    ],
)
def test_what_does_not_fit_the_context_is_refused_with_both_numbers(
    num_tokens: int, max_tokens: int | None, words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        convert.check_length(num_tokens, max_tokens=max_tokens, limits=LIMITS)
    assert all(word in str(refused.value) for word in words)


def test_what_just_fits_is_taken() -> None:
    assert asked(Request(text="é" * 500)).prompt == "é" * 500
    messages = (chat.Message(role="user", content="a" * 333),) * 3
    given = Request(messages=[Chat(role="user", content="a" * 333)] * 3)
    assert asked(given).prompt == chat.Chat(messages=messages)
    params = Params(stop_token_ids=[1] * 1024)
    assert asked(Request(token_ids=[7] * 99, sampling=params)).prompt == array("I", [7] * 99)
    convert.check_length(99, max_tokens=None, limits=LIMITS)
    convert.check_length(60, max_tokens=40, limits=LIMITS)


def test_a_continuation_keeps_the_seed_and_asks_for_what_is_left() -> None:
    sampling = asked(Request(text="a", sampling=Params(seed=5, max_tokens=10, stop_token_ids=[7]))).sampling
    prompt = convert.prompt_message(array("I", [1, 2]))
    request = convert.worker_request(
        prompt, request_id="r", model="tiny", received=[3, 4, 5], sampling=sampling, namespace="n"
    )
    assert list(request.token_ids) == [1, 2, 3, 4, 5]
    assert (request.sampling.seed, request.sampling.max_tokens) == (5, 7)
    assert list(request.sampling.stop_token_ids) == [7]
    assert not request.sampling.HasField("temperature")
    assert (request.request_id, request.model, request.cache_namespace) == ("r", "tiny", "n")


EVERYTHING = Params(
    seed=5,
    max_tokens=10,
    min_p=0.25,
    typical_p=0.5,
    repetition_penalty=1.5,
    presence_penalty=-1,
    frequency_penalty=2,
    logit_bias={7: -0.5},
    min_tokens=6,
    logprobs=0,
    prompt_logprobs=2,
    temperature=0.5,
    top_k=3,
    top_p=0.75,
    stop_token_ids=[9],
    ignore_eos=True,
    structured=common_pb2.StructuredOutput(regex="a+"),
)


def sent(received: list[int], *, choice: int = 0) -> worker_pb2.WorkerServiceGenerateRequest:
    """To a replica, of a request with everything in it."""
    sampling = asked(Request(text="a", sampling=EVERYTHING)).sampling.of_choice(choice)
    return convert.worker_request(
        convert.prompt_message(array("I", [1, 2])),
        request_id="r",
        model="tiny",
        received=received,
        sampling=sampling,
        bad_words=[(4,), (5, 6)],
        priority=asked(Request(text="a", priority=4)).priority,
        namespace="",
    )


def test_a_first_try_sends_every_parameter_as_it_came() -> None:
    request = sent([])
    assert request.sampling == EVERYTHING
    assert (request.num_output_tokens, request.priority) == (0, 4)
    assert [list(word.token_ids) for word in request.bad_words] == [[4], [5, 6]]


def test_a_continuation_says_how_much_is_output_and_what_is_still_to_come() -> None:
    request = sent([3, 4, 5, 6])
    assert (request.num_output_tokens, request.sampling.max_tokens, request.sampling.min_tokens) == (4, 6, 2)
    assert not request.sampling.HasField("prompt_logprobs"), "they came with the first token"
    assert request.sampling.logprobs == 0
    assert request.sampling.structured.regex == "a+"
    assert [list(word.token_ids) for word in request.bad_words] == [[4], [5, 6]]
    assert sent([3] * 7).sampling.min_tokens == 0


def test_each_choice_has_noise_of_its_own_and_the_first_that_of_a_single_answer() -> None:
    requests = [sent([], choice=choice) for choice in range(16)]
    assert requests[0].sampling == EVERYTHING
    assert len({request.sampling.seed for request in requests}) == 16
    assert [request.sampling.seed for request in requests] == [sent([], choice=n).sampling.seed for n in range(16)]
    assert [request.sampling.HasField("prompt_logprobs") for request in requests] == [True] + [False] * 15


def test_no_number_of_choices_is_one() -> None:
    assert [asked(Request(text="a", n=n)).num_choices for n in (0, 1, 16)] == [1, 1, 16]


@pytest.mark.parametrize(
    "request_", [inference_pb2.TokenizeRequest(), inference_pb2.TokenizeRequest(text="a", messages=[Chat(role="user")])]
)
def test_tokenize_takes_one_kind_of_prompt(request_: inference_pb2.TokenizeRequest) -> None:
    with pytest.raises(InvalidRequest, match="exactly one of"):
        convert.text_prompt(request_, model="tiny", bounds=BOUNDS)


@pytest.mark.parametrize("num_tokens", [0, 1, 16_384, 40_000])
def test_what_is_packed_in_slices_is_whole(num_tokens: int) -> None:
    limits = convert.Limits(context_tokens=50_000, vocab_size=50)
    bounds = convert.Bounds(max_messages=1, max_prompt_bytes=1 << 20)
    ids = [position % 50 for position in range(num_tokens)]
    request = Request(token_ids=ids) if ids else Request(text="a")
    asked = convert.asked(request, model="tiny", bounds=bounds, limits=limits, draw_seed=lambda: 1)
    if ids:
        assert asked.prompt == array("I", ids)
    assert list(convert.prompt_message(array("I", ids)).token_ids) == ids
    assert list(convert.tokenized(array("I", ids)).token_ids) == ids


def test_a_bad_token_far_behind_is_named_by_its_position() -> None:
    limits = convert.Limits(context_tokens=50_000, vocab_size=50)
    bounds = convert.Bounds(max_messages=1, max_prompt_bytes=1 << 20)
    request = Request(token_ids=[1] * 20_000 + [50])
    with pytest.raises(InvalidRequest, match=r"token_ids\[20000\] is 50"):
        convert.asked(request, model="tiny", bounds=bounds, limits=limits, draw_seed=lambda: 1)
