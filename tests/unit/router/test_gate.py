"""What a router says to a request before, and right after, it is decoded."""

import random

import pytest
from prometheus_client import CollectorRegistry

from ostrya.api.v1 import common_pb2, inference_pb2
from ostrya.errors import InvalidRequest
from ostrya.prefix.index import PrefixIndex
from ostrya.router import convert
from ostrya.router.fleet import Fleet
from ostrya.router.gate import Gate, outermost_fields
from ostrya.router.metrics import RouterMetrics
from ostrya.router.offload import Offload
from ostrya.router.served import ServedModel
from tests.fakes.tokenizer import byte_tokenizer

GENERATE, TOKENIZE = ("/ostrya.api.v1.InferenceService/" + name for name in ("Generate", "Tokenize"))
Request = inference_pb2.GenerateRequest
Tokenize = inference_pb2.TokenizeRequest
Chat = inference_pb2.ChatMessage
Params = common_pb2.SamplingParams
TURN = Chat(role="user", content="x" * 500)
UNPACKED = b"\x28\x05"
"""A token id with a tag of its own."""


class Stand:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        served = ServedModel(
            name="tiny",
            tokenizer=byte_tokenizer(),
            fleet=Fleet(index=PrefixIndex(), clock=lambda: 0.0),
            offload=Offload(),
            clock=lambda: 0.0,
        )
        bounds = convert.Bounds(max_messages=200, max_prompt_bytes=1 << 20)
        metrics = RouterMetrics(self.registry, model="tiny", pool="default")
        self.gate = Gate(served=served, bounds=bounds, metrics=metrics)

    def refused(self) -> float | None:
        return self.registry.get_sample_value("ostrya_router_requests_total", {"code": "INVALID_ARGUMENT"})


@pytest.mark.parametrize(
    ("method", "raw", "words"),
    [
        (GENERATE, Request(messages=[TURN] * 201).SerializeToString(), ("messages", "more than 200", "at most 200")),
        (TOKENIZE, Tokenize(messages=[TURN] * 201).SerializeToString(), ("messages", "at most 200 messages")),
        (GENERATE, Request(text="x" * ((1 << 20) + 1)).SerializeToString(), ("text is 1048577 bytes", "1048576 bytes")),
        (
            GENERATE,
            Request(text="a", sampling=Params(stop_token_ids=[5] * 170_000)).SerializeToString(),
            ("sampling is more than 163840 bytes", "1024 stop_token_ids"),
        ),
        (GENERATE, UNPACKED * 40_000, ("request", "more than 1024 fields", "packed")),
    ],
    ids=["messages", "tokenized messages", "text", "stop ids", "unpacked ids"],
)
def test_a_giant_is_refused_before_it_is_decoded(method: str, raw: bytes, words: tuple[str, ...]) -> None:
    stand = Stand()
    with pytest.raises(InvalidRequest) as refused:
        stand.gate.check_raw(method, raw)
    assert all(word in str(refused.value) for word in words)
    assert stand.refused() == (method == GENERATE)


@pytest.mark.parametrize(
    "request_",
    [
        Request(messages=[TURN] * 200),
        Request(text="x" * (1 << 20)),
        Request(token_ids=range(200_000)),
        Request(
            text="x" * 70_000,
            sampling=Params(
                stop_token_ids=[2**32 - 1] * 1_024,
                logit_bias={2**32 - 1 - n: -100.0 for n in range(1_024)},
                min_tokens=9,
            ),
            stop=["x" * 256] * 16,
            bad_words=["x" * 256] * 128,
        ),
    ],
    ids=["messages", "text", "ids", "all at once"],
)
def test_what_is_large_and_within_the_limits_passes(request_: Request) -> None:
    stand = Stand()
    stand.gate.check_raw(GENERATE, request_.SerializeToString())
    stand.gate.check(request_)
    assert stand.refused() == 0


def test_what_is_no_giant_is_left_to_decoding() -> None:
    gate = Stand().gate
    gate.check_raw(GENERATE, UNPACKED * 30_000)
    gate.check_raw("/grpc.health.v1.Health/Check", UNPACKED * 40_000)
    gate.check_raw(GENERATE, b"\xff" * 100_000)
    gate.check(object())


def test_lists_are_counted_once_they_are_decoded() -> None:
    stand = Stand()
    with pytest.raises(InvalidRequest, match="1025 ids; allowed: at most 1024 ids"):
        stand.gate.check(Request(sampling=Params(stop_token_ids=[5] * 1_025)))
    assert stand.refused() == 1


def test_the_fields_of_a_message_are_seen_as_decoding_sees_them() -> None:
    request = Request(
        request_id="r", text="é" * 200, messages=[TURN, Chat()], token_ids=[2**32 - 1], sampling=Params(seed=2**64 - 1)
    )
    raw = request.SerializeToString() + UNPACKED + b"\x99\x06" + bytes(8) + b"\xf5\x01" + bytes(4)
    sizes = {1: 1, 3: 400, 6: request.sampling.ByteSize()}
    seen = list(outermost_fields(raw))
    assert [number for number, _ in seen] == [1, 3, 4, 4, 5, 6, 5, 99, 30]
    assert {number: size for number, size in seen if number in sizes} == sizes
    assert [size for number, size in seen if number in (4, 99, 30)] == [TURN.ByteSize(), 0, 8, 4]


def test_bytes_that_make_no_sense_end_the_look() -> None:
    draw = random.Random(4)
    for _ in range(5_000):
        raw = draw.randbytes(draw.randrange(40))
        assert len(list(outermost_fields(raw))) <= len(raw)
    assert list(outermost_fields(b"\x80" * 1_000_000)) == []
    assert list(outermost_fields(UNPACKED + b"\x0b" + UNPACKED)) == [(5, 1)]
