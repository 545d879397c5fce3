"""Every string, bytes and repeated field of every request has a bound: walked by descriptor, tried over sockets against
the real servicers. A new field without a row here fails; so does a row whose bound is not kept."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ostrya.router.settings import RouterSettings
from ostrya.service.server import channel
from tests.integration.bed import bed, saying
from tests.integration.edge import CONTEXT, SERVICES, failure_of, violation, worker

SETTINGS = RouterSettings(no_replica_wait_s=0.2, max_messages=8, max_prompt_bytes=4_096)

Json: TypeAlias = "str | int | float | Sequence[Json] | Mapping[str, Json] | Mapping[int, float]"
Row: TypeAlias = tuple[dict[str, "Json"], str, str]
"""A request as keyword arguments, the field that its refusal names, and the words that tell the limit."""

LONG = "x" * 257
NAME = "at most 256 characters"
STOP_IDS: Row = ({"text": "a", "sampling": {"stop_token_ids": [5] * 1_025}}, "sampling.stop_token_ids", "1024 ids")
BIASES: list[Row] = [
    ({"text": "a", "sampling": {"logit_bias": dict.fromkeys(range(1_025), 0.5)}}, "sampling.logit_bias", "1024 tokens"),
    ({"text": "a", "sampling": {"logit_bias": {1_000: 0.5}}}, "sampling.logit_bias", "tokens 0 to 999"),
    ({"text": "a", "sampling": {"logit_bias": {5: 101.0}}}, "sampling.logit_bias[5]", "[-100, 100]"),
]
FORMS: dict[str, list[Row]] = {
    **{
        kind: [
            (
                {"text": "a", "sampling": {"structured": {kind: "x" * 65_537}}},
                f"sampling.structured.{kind}",
                "at most 65536 bytes",
            )
        ]
        for kind in ("json_schema", "regex", "lark")
    },
    "choice": [
        (
            {"text": "a", "sampling": {"structured": {"choice": ["x"] * 1_025}}},
            "sampling.structured.choice",
            "at most 1024",
        ),
        (
            {"text": "a", "sampling": {"structured": {"choice": ["x" * 32_769] * 2}}},
            "sampling.structured.choice",
            "at most 65536 bytes",
        ),
    ],
}
TURN: Json = {"role": "user", "content": "a"}

ROWS: dict[str, list[Row]] = {
    "InferenceService.Generate request_id": [({"request_id": "x" * 129, "text": "a"}, "request_id", "1 to 128")],
    "InferenceService.Generate model": [({"model": LONG, "text": "a"}, "model", NAME)],
    "InferenceService.Generate text": [({"text": "x" * 4_097}, "text", "at most 4096 bytes")],
    "InferenceService.Generate messages": [({"messages": [TURN] * 9}, "messages", "at most 8 messages")],
    "InferenceService.Generate messages.role": [
        ({"messages": [{"role": LONG, "content": "a"}]}, "messages[0].role", "system, user")
    ],
    "InferenceService.Generate messages.content": [
        ({"messages": [{"role": "user", "content": "x" * 2_049}] * 2}, "messages", "at most 4096 bytes")
    ],
    "InferenceService.Generate token_ids": [
        ({"token_ids": [5] * 1_025}, "token_ids", "at most 1024 ids"),
        ({"token_ids": [1_000]}, "token_ids[0]", "0 to 999"),
    ],
    "InferenceService.Generate sampling.stop_token_ids": [STOP_IDS],
    "InferenceService.Generate stop": [
        ({"text": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
        ({"text": "a", "stop": ["a", LONG]}, "stop[1]", "1 to 256 bytes"),
    ],
    "InferenceService.Generate bad_words": [
        ({"text": "a", "bad_words": ["x"] * 129}, "bad_words", "at most 128"),
        ({"text": "a", "bad_words": ["a", LONG]}, "bad_words[1]", "1 to 256 bytes"),
    ],
    "InferenceService.Generate sampling.logit_bias": BIASES,
    "InferenceService.Tokenize model": [({"model": LONG, "text": "a"}, "model", NAME)],
    "InferenceService.Tokenize text": [({"text": "x" * 4_097}, "text", "at most 4096 bytes")],
    "InferenceService.Tokenize messages": [({"messages": [TURN] * 9}, "messages", "at most 8 messages")],
    "InferenceService.Tokenize messages.role": [
        ({"messages": [{"role": LONG, "content": "a"}]}, "messages[0].role", "system, user")
    ],
    "InferenceService.Tokenize messages.content": [
        ({"messages": [{"role": "user", "content": "x" * 2_049}] * 2}, "messages", "at most 4096 bytes")
    ],
    "AdminService.ExplainRoute decision_id": [({"decision_id": LONG}, "decision_id", NAME)],
    "AdminService.CordonReplica worker_id": [({"worker_id": LONG}, "worker_id", NAME)],
    "AdminService.UncordonReplica worker_id": [({"worker_id": LONG}, "worker_id", NAME)],
    "AdminService.DrainReplica worker_id": [({"worker_id": LONG}, "worker_id", NAME)],
    "WorkerService.Generate request_id": [({"request_id": LONG, "token_ids": [1]}, "request_id", NAME)],
    "WorkerService.Generate model": [({"model": LONG, "token_ids": [1]}, "model", NAME)],
    "WorkerService.Generate token_ids": [
        ({"token_ids": [5] * CONTEXT}, "token_ids", f"at most {CONTEXT - 1}"),
        ({"token_ids": [1_000]}, "token_ids[0]", "0 to 999"),
    ],
    "WorkerService.Generate sampling.stop_token_ids": [
        ({"token_ids": [1], "sampling": {"stop_token_ids": [5] * 1_025}}, "sampling.stop_token_ids", "1024 ids")
    ],
    "WorkerService.Generate sampling.logit_bias": [
        ({"token_ids": [1], "sampling": arguments["sampling"]}, field, words) for arguments, field, words in BIASES
    ],
    "WorkerService.Generate bad_words": [
        ({"token_ids": [1], "bad_words": [{"token_ids": [5]}] * 257}, "bad_words", "at most 256")
    ],
    "WorkerService.Generate bad_words.token_ids": [
        ({"token_ids": [1], "bad_words": [{"token_ids": [5] * 513}]}, "bad_words[0].token_ids", "1 to 512 tokens"),
        ({"token_ids": [1], "bad_words": [{"token_ids": [5, 1_000]}]}, "bad_words[0].token_ids[1]", "0 to 999"),
    ],
    "WorkerService.Generate cache_namespace": [({"cache_namespace": LONG, "token_ids": [1]}, "cache_namespace", NAME)],
}
for kind, forms in FORMS.items():
    ROWS[f"InferenceService.Generate sampling.structured.{kind}"] = forms
    ROWS[f"WorkerService.Generate sampling.structured.{kind}"] = [
        ({"token_ids": [1], "sampling": arguments["sampling"]}, field, words) for arguments, field, words in forms
    ]
# Numbers that mean a time: the only others which a caller may choose without a bound of their type.
TIMES: dict[str, list[Row]] = {
    f"{method} {value}": [
        (
            {"worker_id": "w0", "timeout_s": value} if "Admin" in method else {"timeout_s": value},
            "timeout_s",
            "0 to 86400 seconds",
        )
    ]
    for method in ("AdminService.DrainReplica", "WorkerService.Drain")
    for value in (-1.0, 86_401.0, 3e38, float("inf"), float("nan"))
}


def unbounded(message: Descriptor, before: str = "") -> Iterator[str]:
    """Fields that a message does not bound by itself, those of its parts included."""
    for field in message.fields:
        if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield before + field.name
        if field.message_type is not None:
            yield from unbounded(field.message_type, f"{before}{field.name}.")


def test_every_field_of_every_request_has_a_row() -> None:
    fields = {
        f"{service.name}.{method.name} {field}"
        for service in SERVICES
        for method in service.methods
        for field in unbounded(method.input_type)
    }
    assert fields == set(ROWS)


@asynccontextmanager
async def router() -> AsyncIterator[grpc.aio.Channel]:
    async with (
        bed(saying("x"), settings=SETTINGS) as stand,
        channel(f"127.0.0.1:{stand.router.port}", max_message_bytes=1 << 20) as way,
    ):
        yield way


async def refusals(way: grpc.aio.Channel, rows: dict[str, list[Row]]) -> list[str]:
    """What is not refused as its row says."""
    wrong = []
    for name, cases in rows.items():
        service, method_name = name.split()[0].split(".")
        called = next(one for one in SERVICES if one.name == service).methods_by_name[method_name]
        make = cast("Callable[..., Message]", GetMessageClass(called.input_type))
        for arguments, field, limit in cases:
            error = await failure_of(way, called, make(**arguments).SerializeToString())
            seen = (error.code(), *violation(error))
            if seen[:2] != (grpc.StatusCode.INVALID_ARGUMENT, field) or limit not in seen[2]:
                wrong.append(f"{name}: {seen}")
    return wrong


def of(rows: dict[str, list[Row]], *, is_worker: bool) -> dict[str, list[Row]]:
    return {name: cases for name, cases in rows.items() if name.startswith("Worker") == is_worker}


async def test_a_router_refuses_what_is_over_a_bound_with_field_and_limit() -> None:
    async with router() as way:
        assert await refusals(way, of(ROWS, is_worker=False) | of(TIMES, is_worker=False)) == []


async def test_a_worker_does_not_trust_its_router_to_have_refused_it() -> None:
    async with worker() as (way, _):
        assert await refusals(way, of(ROWS, is_worker=True) | of(TIMES, is_worker=True)) == []
