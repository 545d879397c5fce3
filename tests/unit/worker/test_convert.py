"""Requests are checked field by field, absent fields take their defaults, and every refusal says what and how much."""

import math

import pytest
from msgspec.structs import replace

from ostrya.api.v1 import common_pb2, worker_pb2
from ostrya.engine.types import (
    EngineRequest,
    FinishReason,
    Grammar,
    Load,
    RequestId,
    Sampling,
    SequenceOutput,
    TokenScore,
)
from ostrya.errors import InvalidRequest, UnknownModel
from ostrya.worker import convert
from tests.fakes import engine_info

INFO = replace(engine_info.INFO, model="fake")


def convert_request(
    *, token_ids: tuple[int, ...] = (1, 2, 3), model: str = "", sampling: common_pb2.SamplingParams | None = None
) -> EngineRequest:
    request = worker_pb2.WorkerServiceGenerateRequest(
        request_id="r", model=model, token_ids=token_ids, sampling=sampling, cache_namespace="n"
    )
    return convert.engine_request(request, request_id=RequestId("r#1"), info=INFO, draw_seed=lambda: 77)


def test_absent_fields_take_their_defaults() -> None:
    assert convert_request() == EngineRequest(
        request_id=RequestId("r#1"),
        token_ids=[1, 2, 3],
        sampling=Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=77, max_tokens=97),
        cache_namespace="n",
    )


def test_given_fields_are_taken_even_when_zero() -> None:
    given = common_pb2.SamplingParams(
        temperature=0, top_k=3, top_p=0.5, seed=0, max_tokens=4, stop_token_ids=[9], ignore_eos=True
    )
    assert convert_request(sampling=given).sampling == Sampling(
        temperature=0.0, top_k=3, top_p=0.5, seed=0, max_tokens=4, stop_token_ids=frozenset({9}), ignore_eos=True
    )


def test_everything_that_changes_the_choice_reaches_the_engine() -> None:
    given = common_pb2.SamplingParams(
        min_p=0.25,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={7: -0.5},
        min_tokens=3,
        logprobs=0,
        prompt_logprobs=2,
    )
    request = worker_pb2.WorkerServiceGenerateRequest(
        token_ids=[1, 2, 3],
        sampling=given,
        num_output_tokens=2,
        priority=-100,
        bad_words=[worker_pb2.TokenSequence(token_ids=ids) for ids in ([4], [5, 6])],
    )
    asked = convert.engine_request(request, request_id=RequestId("r"), info=INFO, draw_seed=lambda: 77)
    assert asked == EngineRequest(
        request_id=RequestId("r"),
        token_ids=[1, 2, 3],
        num_output_tokens=2,
        priority=-100,
        sampling=Sampling(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            seed=77,
            max_tokens=97,
            min_p=0.25,
            typical_p=0.5,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias={7: -0.5},
            bad_words=((4,), (5, 6)),
            min_tokens=3,
            num_top=0,
            num_prompt_top=2,
        ),
    )


def test_a_priority_beyond_the_range_is_refused() -> None:
    request = worker_pb2.WorkerServiceGenerateRequest(token_ids=[1], priority=101)
    with pytest.raises(InvalidRequest, match=r"priority is 101; allowed: -100 to 100"):
        convert.engine_request(request, request_id=RequestId("r"), info=INFO)


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        (common_pb2.StructuredOutput(json_schema="{}"), Grammar(kind="json_schema", text="{}")),
        (common_pb2.StructuredOutput(regex="a+"), Grammar(kind="regex", text="a+")),
        (common_pb2.StructuredOutput(lark='start: "a"'), Grammar(kind="lark", text='start: "a"')),
        (common_pb2.StructuredOutput(choice=["a", 'b"']), Grammar(kind="choice", text='["a", "b\\""]')),
    ],
)
def test_a_form_reaches_the_engine(form: common_pb2.StructuredOutput, grammar: Grammar) -> None:
    assert convert_request(sampling=common_pb2.SamplingParams(structured=form)).sampling.grammar == grammar


def test_a_request_is_not_output_alone() -> None:
    request = worker_pb2.WorkerServiceGenerateRequest(token_ids=[1, 2, 3], num_output_tokens=3)
    with pytest.raises(InvalidRequest, match="num_output_tokens is 3; allowed: below the number of token_ids"):
        convert.engine_request(request, request_id=RequestId("r"), info=INFO)


def test_more_tokens_than_there_is_room_for_cannot_be_the_least() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.min_tokens is 98; allowed: at most 97"):
        convert_request(sampling=common_pb2.SamplingParams(min_tokens=98))


def test_the_output_of_another_replica_is_no_prompt_to_be_scored() -> None:
    info = replace(INFO, context_tokens=200_000)
    request = worker_pb2.WorkerServiceGenerateRequest(
        token_ids=[1] * 131_073, num_output_tokens=1, sampling=common_pb2.SamplingParams(prompt_logprobs=0)
    )
    convert.engine_request(request, request_id=RequestId("r"), info=info)
    request.num_output_tokens = 0
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        convert.engine_request(request, request_id=RequestId("r"), info=info)


def test_model_may_be_named_or_left_out() -> None:
    assert convert_request(model="fake") == convert_request(model="")
    with pytest.raises(UnknownModel, match="'gpt-5' is not served here; models: fake"):
        convert_request(model="gpt-5")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1.0}, "sampling.temperature is -1; allowed: [0, 100]"),
        ({"temperature": math.nan}, "sampling.temperature is nan; allowed: [0, 100]"),
        ({"temperature": 100.5}, "sampling.temperature is 100.5; allowed: [0, 100]"),
        ({"top_p": 0.0}, "sampling.top_p is 0; allowed: (0, 1]"),
        ({"top_p": 1.5}, "sampling.top_p is 1.5; allowed: (0, 1]"),
        ({"top_p": math.nan}, "sampling.top_p is nan; allowed: (0, 1]"),
        ({"top_k": -1}, "sampling.top_k is -1; allowed: 0 (all) or more"),
        ({"max_tokens": 0}, "sampling.max_tokens is 0; allowed: 1 or more, or absent for what the context has left"),
        ({"max_tokens": -5}, "sampling.max_tokens is -5; allowed: 1 or more, or absent for what the context has left"),
        (
            {"max_tokens": 98},
            "sampling.max_tokens is 98 with a prompt of 3 tokens; "
            "allowed: at most 97 with this prompt, as the context has 100 tokens",
        ),
    ],
)
def test_bad_sampling_is_refused_with_field_value_and_range(sampling: dict[str, float], message: str) -> None:
    params = common_pb2.SamplingParams()
    for field, value in sampling.items():
        setattr(params, field, value)
    with pytest.raises(InvalidRequest) as caught:
        convert_request(sampling=params)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((), "token_ids is empty; allowed: at least 1 token"),
        ((1, 1000), "token_ids[1] is 1000; allowed: 0 to 999, the model's vocabulary"),
        (
            (1,) * 100,
            "token_ids is 100 tokens long; allowed: at most 99, one below the context of 100; shorten the prompt",
        ),
    ],
)
def test_bad_prompt_is_refused_with_value_and_limit(token_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert_request(token_ids=token_ids)
    assert str(caught.value) == message


def test_a_long_prompt_is_whole_and_its_bad_token_is_named_by_its_position() -> None:
    info = replace(INFO, context_tokens=50_000)
    ids = [position % 999 for position in range(40_000)]
    request = worker_pb2.WorkerServiceGenerateRequest(token_ids=ids)
    assert convert.engine_request(request, request_id=RequestId("r"), info=info).token_ids == ids
    request.token_ids[39_999] = 1_000
    with pytest.raises(InvalidRequest, match=r"token_ids\[39999\] is 1000"):
        convert.engine_request(request, request_id=RequestId("r"), info=info)


def test_stop_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling.stop_token_ids\[0\] is 1000"):
        convert_request(sampling=common_pb2.SamplingParams(stop_token_ids=[1000]))


def test_drawn_seeds_cover_64_bits() -> None:
    seeds = {convert.draw_seed() for _ in range(64)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan, math.inf])
def test_drain_timeout_must_be_a_number_of_seconds(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        convert.drain_timeout_s(worker_pb2.DrainRequest(timeout_s=timeout_s), default=30)


def test_drain_timeout_has_a_default_and_may_be_zero() -> None:
    assert convert.drain_timeout_s(worker_pb2.DrainRequest(), default=30) == 30
    assert convert.drain_timeout_s(worker_pb2.DrainRequest(timeout_s=0), default=30) == 0


def test_output_becomes_a_message_with_load() -> None:
    output = SequenceOutput(request_id=RequestId("r"), token_ids=(5, 6), finish_reason=FinishReason.LENGTH)
    load = Load(num_running=2, queried_tokens=9, hit_tokens=4)
    message = convert.response(output, usage=common_pb2.Usage(prompt_tokens=3), load=load)
    assert list(message.token_ids) == [5, 6]
    assert message.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert message.usage.prompt_tokens == 3
    assert (message.load.num_running, message.load.queried_tokens_total, message.load.hit_tokens_total) == (2, 9, 4)


def test_scores_become_log_probabilities() -> None:
    score, bare = TokenScore(-0.5, (7, 8), (-0.25, -0.5)), TokenScore(-2.0)
    output = SequenceOutput(request_id=RequestId("r"), token_ids=(8, 9), scores=(score, bare), prompt_scores=(bare,))
    message = convert.response(output, usage=None, load=Load())
    expected = common_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=[7, 8], top_logprobs=[-0.25, -0.5])
    assert list(message.logprobs) == [expected, common_pb2.TokenLogprobs(logprob=-2)]
    assert list(message.prompt_logprobs) == [common_pb2.TokenLogprobs(logprob=-2)]
