"""The ranges of sampling parameters, which router and worker check with the same words."""

import math
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ostrya.api.v1 import common_pb2, inference_pb2, worker_pb2
from ostrya.engine.types import RequestId
from ostrya.errors import InvalidRequest
from ostrya.router import convert as router_convert
from ostrya.service.sampling import check_prompt_logprobs
from ostrya.worker import convert as worker_convert
from tests.fakes import engine_info

Params = common_pb2.SamplingParams
Form = common_pb2.StructuredOutput
INFO = replace(engine_info.INFO, vocab_size=50)


def by_router(params: Params) -> None:
    router_convert.asked(
        inference_pb2.GenerateRequest(text="a", sampling=params),
        model="tiny",
        bounds=router_convert.Bounds(max_messages=1, max_prompt_bytes=100),
        limits=router_convert.Limits(context_tokens=100, vocab_size=50),
        draw_seed=lambda: 1,
    )


def by_worker(params: Params) -> None:
    request = worker_pb2.WorkerServiceGenerateRequest(token_ids=[1, 2, 3], sampling=params)
    worker_convert.engine_request(request, request_id=RequestId("r"), info=INFO)


@pytest.mark.parametrize("check", [by_router, by_worker])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        (Params(min_p=-0.1), "sampling.min_p is -0.100000001; allowed: [0, 1]"),
        (Params(min_p=math.nan), "sampling.min_p is nan; allowed: [0, 1]"),
        (Params(typical_p=0), "sampling.typical_p is 0; allowed: (0, 1]"),
        (Params(typical_p=1.5), "sampling.typical_p is 1.5; allowed: (0, 1]"),
        (Params(repetition_penalty=0), "sampling.repetition_penalty is 0; allowed: [0.01, 100]"),
        (Params(repetition_penalty=math.inf), "sampling.repetition_penalty is inf; allowed: [0.01, 100]"),
        (Params(presence_penalty=2.5), "sampling.presence_penalty is 2.5; allowed: [-2, 2]"),
        (Params(frequency_penalty=-2.5), "sampling.frequency_penalty is -2.5; allowed: [-2, 2]"),
        (
            Params(logit_bias={50: 1}),
            "sampling.logit_bias is about token 50; allowed: tokens 0 to 49, the model's vocabulary",
        ),
        (Params(logit_bias={4: math.nan}), "sampling.logit_bias[4] is nan; allowed: [-100, 100]"),
        (Params(min_tokens=-1), "sampling.min_tokens is -1; allowed: 0 or more"),
        (Params(min_tokens=5, max_tokens=4), "sampling.min_tokens is 5; allowed: at most max_tokens (4)"),
        (Params(logprobs=21), "sampling.logprobs is 21; allowed: [0, 20]"),
        (Params(logprobs=-1), "sampling.logprobs is -1; allowed: [0, 20]"),
        (
            Params(structured=Form()),
            "sampling.structured is nothing; allowed: exactly one of json_schema, regex, choice, lark",
        ),
        (
            Params(structured=Form(regex="", choice=["a"])),
            "sampling.structured is regex and choice; allowed: exactly one of json_schema, regex, choice, lark",
        ),
        (
            Params(structured=Form(lark="x" * 65_537)),
            "sampling.structured.lark is 65537 bytes long; allowed: at most 65536 bytes",
        ),
        (
            Params(structured=Form(choice=["é" * 16_385] * 2)),
            "sampling.structured.choice is 65540 bytes long; allowed: at most 65536 bytes",
        ),
        (Params(structured=Form(choice=["a", ""])), "sampling.structured.choice[1] is empty; allowed: 1 byte or more"),
        (Params(prompt_logprobs=21), "sampling.prompt_logprobs is 21; allowed: [0, 20]"),
    ],
)
def test_a_value_out_of_range_is_refused_by_router_and_worker_in_the_same_words(
    check: Callable[[Params], None], params: Params, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(params)
    assert str(refused.value) == message


@pytest.mark.parametrize("check", [by_router, by_worker])
def test_the_ends_of_every_range_are_taken(check: Callable[[Params], None]) -> None:
    check(Params(min_p=0, typical_p=1, repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=2, min_tokens=0))
    check(
        Params(min_p=1, typical_p=1e-9, repetition_penalty=100, logprobs=0, prompt_logprobs=20, logit_bias={49: -100})
    )
    check(Params(structured=Form(json_schema="x" * 65_536)))
    check(Params(structured=Form(choice=["x" * 64] * 1_024)))
    check(Params(min_tokens=4, max_tokens=4, logprobs=20, prompt_logprobs=0, logit_bias={0: 100}))


def test_log_probabilities_of_a_prompt_are_bounded_by_their_number() -> None:
    check_prompt_logprobs(8_192, 15)
    check_prompt_logprobs(1_000_000, None)
    with pytest.raises(InvalidRequest, match=r"15 with a prompt of 8193 tokens.*at most 131072"):
        check_prompt_logprobs(8_193, 15)
