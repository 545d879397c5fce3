"""The bad-input table: every row over a real socket, against the real stack with the real model.

Each case checks the status, the message (what, value, limit) and that nothing is lost: the stack answers a good request
afterwards and no page stays referenced (`stack.idle`).
"""

import json
import math

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from ostrya.api.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from ostrya.client import AsyncClient
from ostrya.service import status
from ostrya.service.server import channel
from tests.integration.stack import RunningStack

Request = inference_pb2.GenerateRequest
Sampling = common_pb2.SamplingParams
Form = common_pb2.StructuredOutput
INVALID = grpc.StatusCode.INVALID_ARGUMENT

MESSAGE = inference_pb2.ChatMessage(role="user", content="")
CONTEXT = 8192
VOCAB = 49152

# name, request, status, what the message must say
CASES: tuple[tuple[str, Request, grpc.StatusCode, tuple[str, ...]], ...] = (
    ("no prompt", Request(), INVALID, ("text, messages, token_ids",)),
    ("empty text", Request(text=""), INVALID, ("text", "empty")),
    ("empty message", Request(messages=[MESSAGE]), INVALID, ("messages[0].content", "empty")),
    ("two kinds", Request(text="a", token_ids=[1]), INVALID, ("text", "token_ids", "one")),
    ("negative temperature", Request(text="a", sampling=Sampling(temperature=-1)), INVALID, ("temperature", "-1", "0")),
    ("NaN", Request(text="a", sampling=Sampling(temperature=math.nan)), INVALID, ("temperature", "nan")),
    ("top_p 0", Request(text="a", sampling=Sampling(top_p=0)), INVALID, ("top_p", "0", "(0, 1]")),
    ("just too much", Request(text="a", sampling=Sampling(temperature=100.00001)), INVALID, ("100.000008", "[0, 100]")),
    ("top_p 2", Request(text="a", sampling=Sampling(top_p=2)), INVALID, ("top_p", "2", "(0, 1]")),
    ("top_k -1", Request(text="a", sampling=Sampling(top_k=-1)), INVALID, ("top_k", "-1")),
    ("max_tokens 0", Request(text="a", sampling=Sampling(max_tokens=0)), INVALID, ("max_tokens", "0", "1")),
    ("max_tokens -5", Request(text="a", sampling=Sampling(max_tokens=-5)), INVALID, ("max_tokens", "-5", "1")),
    ("too long", Request(token_ids=[5] * (CONTEXT + 1)), INVALID, (str(CONTEXT + 1), str(CONTEXT))),
    (
        "prompt and max_tokens too long",
        Request(token_ids=[5] * 100, sampling=Sampling(max_tokens=CONTEXT)),
        INVALID,
        ("100", str(CONTEXT)),
    ),
    ("token id", Request(token_ids=[1, VOCAB]), INVALID, ("token_ids", str(VOCAB))),
    ("far too long text", Request(text="frost 7 " * 500_000), INVALID, ("prompt", "more than", str(CONTEXT))),
    ("a giant text", Request(text="frost 7 " * 900_000), INVALID, ("text", "7200000 bytes", str(4 << 20))),
    ("unknown model", Request(text="a", model="gpt-5"), grpc.StatusCode.NOT_FOUND, ("gpt-5", "smollm2-135m-instruct")),
    ("a long name", Request(text="a", model="g" * 9000), INVALID, ("model", "9000 characters", "256")),
    ("request id", Request(text="a", request_id="a b"), INVALID, ("'a b'", "without spaces")),
    ("too many choices", Request(text="a", n=17), INVALID, ("n is 17", "1 to 16")),
    (
        "a form that is none",
        Request(text="a", sampling=Sampling(structured=Form(json_schema='{"properties": {"a": {"type": "objec"}}}'))),
        INVALID,
        ("sampling.structured.json_schema", "objec", "/properties/a"),
    ),
    ("bytes", Request(text="x" * (9 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED, (str(8 << 20),)),
)


async def refusal(target: str, request: Request) -> grpc.aio.AioRpcError:
    async with channel(target, max_message_bytes=64 << 20) as open_channel:
        stub = inference_pb2_grpc.InferenceServiceStub(open_channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request, timeout=30):
                pass
    return caught.value


@pytest.mark.parametrize(("request_", "code", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_bad_input_is_refused_with_what_value_and_limit(
    stack: RunningStack, request_: Request, code: grpc.StatusCode, words: tuple[str, ...]
) -> None:
    error = await refusal(stack.target, request_)
    assert error.code() is code, error.details()
    for word in words:
        assert word.lower() in (error.details() or "").lower()


async def test_a_refused_field_is_named_in_bad_request(stack: RunningStack) -> None:
    error = await refusal(stack.target, Request(text="a", sampling=Sampling(top_p=2)))
    raw = dict(error.trailing_metadata())[status.DETAILS]
    assert isinstance(raw, bytes)
    details = status_pb2.Status.FromString(raw).details
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in details)
    assert [violation.field for violation in bad.field_violations] == ["sampling.top_p"]


async def test_a_form_several_answers_and_log_probabilities_come_from_the_real_model(stack: RunningStack) -> None:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "green"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["sky", "n"],
        "additionalProperties": False,
    }
    async with AsyncClient(stack.target) as client:
        stream = client.generate(
            "The sky as JSON: ",
            structured={"json_schema": schema},
            n=2,
            logprobs=1,
            max_tokens=60,
            temperature=0,
            bad_words=["green"],
        )
        chunks = [chunk async for chunk in stream]
    for choice in (0, 1):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        assert json.loads("".join(chunk.text for chunk in own))["sky"] == "blue"
        assert stream.ends[choice][0] == "stop"
        assert sum(len(chunk.logprobs) for chunk in own) == stream.ends[choice][1].completion_tokens
    await stack.idle()


async def test_the_stack_serves_and_holds_nothing_after_all_refusals(stack: RunningStack) -> None:
    async with channel(stack.target, max_message_bytes=1 << 20) as open_channel:
        stub = inference_pb2_grpc.InferenceServiceStub(open_channel)
        good = Request(text="The capital of France is", sampling=Sampling(temperature=0, max_tokens=4))
        answers = [answer async for answer in stub.Generate(good, timeout=60)]
    assert answers[-1].usage.completion_tokens == 4
    assert answers[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    await stack.idle()
