"""Python arguments to request messages. Only what a message cannot hold is refused here; the server says what else is
wrong, and a copy of its rules would drift."""

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage

from ostrya.api.v1 import common_pb2, inference_pb2
from ostrya.errors import InvalidRequest
from ostrya.service.bounds import MAX_PRIORITY

Message: TypeAlias = Mapping[str, str]
"""{"role": "system" | "developer" | "user" | "assistant" | "tool", "content": "..."}"""

M = TypeVar("M", bound=ProtoMessage)

_REFUSALS = (TypeError, ValueError, OverflowError)
"""What protobuf raises for a value that a field cannot hold."""
_TEXT = "valid UTF-8 text"
_ALLOWED = {
    FieldDescriptor.CPPTYPE_STRING: _TEXT,
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    # The server takes no negative counts, although the message could hold them.
    FieldDescriptor.CPPTYPE_INT32: f"an integer from 0 to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"an integer from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"an integer from 0 to {2**64 - 1}",
}
_PRIORITIES = f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
_MAX_SHOWN = 64


class StructuredOutput(TypedDict, total=False):
    """The form of an answer: exactly one of these."""

    json_schema: str | Mapping[str, object] | bool
    regex: str
    choice: Sequence[str]
    lark: str
    """An EBNF grammar with a rule `start`."""


class GenerateOptions(TypedDict, total=False):
    """How to answer. What is absent takes the server's default; absent is not zero."""

    model: str
    request_id: str
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    min_tokens: int
    n: int
    priority: int
    """Higher goes first; from -100 to 100."""
    logprobs: int
    prompt_logprobs: int
    structured: StructuredOutput
    continue_final_message: bool


def generate_request(
    text: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: GenerateOptions,
) -> inference_pb2.GenerateRequest:
    """The message for one answer; InvalidRequest for what it cannot hold, TypeError for an unknown option."""
    known = GenerateOptions.__annotations__
    if unknown := options.keys() - known.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    stop = options.get("stop")
    fields = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    given: dict[str, object] = {name: value for name, value in options.items() if name in fields}
    if (structured := options.get("structured")) is not None:
        given["structured"] = _structured(structured)
    sampling = made(common_pb2.SamplingParams, "sampling.", **given)
    return made(
        inference_pb2.GenerateRequest,
        request_id=options.get("request_id"),
        model=options.get("model"),
        text=text,
        messages=chat_messages(messages),
        token_ids=token_ids,
        stop=[stop] if isinstance(stop, str) else stop,
        continue_final_message=options.get("continue_final_message"),
        bad_words=options.get("bad_words"),
        n=options.get("n"),
        priority=options.get("priority"),
        sampling=sampling,
    )


def _structured(structured: StructuredOutput) -> common_pb2.StructuredOutput:
    where = "sampling.structured"
    known = StructuredOutput.__annotations__
    if not isinstance(structured, Mapping) or structured.keys() - known.keys():
        raise InvalidRequest(where, _type(structured), f"a dictionary with one of {', '.join(known)}")
    schema = structured.get("json_schema")
    fields: dict[str, object] = {**structured}
    if schema is not None and not isinstance(schema, str):
        try:
            fields["json_schema"] = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where}.json_schema", _type(schema), "what JSON can hold") from error
    return made(common_pb2.StructuredOutput, f"{where}.", **fields)


def chat_messages(messages: Sequence[Message] | None) -> list[inference_pb2.ChatMessage]:
    """Messages for the wire; InvalidRequest when one is not a role and a content, both text."""
    if not isinstance(messages, Sequence | None):
        raise InvalidRequest("messages", _type(messages), "a list")
    chat = []
    for position, one in enumerate(messages or ()):
        where = f"messages[{position}]"
        if not isinstance(one, Mapping):
            raise InvalidRequest(where, _type(one), "an object with role and content")
        for name in ("role", "content"):
            if one.get(name) is None:
                raise InvalidRequest(f"{where}.{name}", "absent", _TEXT)
        chat.append(made(inference_pb2.ChatMessage, f"{where}.", role=one["role"], content=one["content"]))
    return chat


def made(kind: type[M], where: str = "", /, **fields: object) -> M:
    """A message with these fields; None = absent. InvalidRequest names the first it cannot hold, never its text."""
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except _REFUSALS as error:
            raise _refusal(kind, where, name, value) from error
    return message


def _refusal(kind: type[ProtoMessage], where: str, name: str, value: object) -> InvalidRequest:
    field = kind.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        allowed = f"from {_ALLOWED[entry['key'].cpp_type]} to {_ALLOWED[entry['value'].cpp_type]}"
        return InvalidRequest(where + name, _shown(value, allowed), f"a dictionary {allowed}")
    allowed = _PRIORITIES if name == "priority" else _ALLOWED[field.cpp_type]
    if not field.is_repeated:
        return InvalidRequest(where + name, _shown(value, allowed), allowed)
    if not isinstance(value, list | tuple):
        return InvalidRequest(where + name, _type(value), f"a list, each {allowed}")
    position = next(number for number, one in enumerate(value) if not _holds(kind, name, one))
    return InvalidRequest(f"{where}{name}[{position}]", _shown(value[position], allowed), allowed)


def _holds(kind: type[ProtoMessage], name: str, element: object) -> bool:
    try:
        kind(**{name: [element]})
    except _REFUSALS:
        return False
    return True


def _shown(value: object, allowed: str) -> str:
    """A value that belongs where text does may be a prompt, so only its kind is told."""
    if allowed != _TEXT:
        return f"{value!r:.{_MAX_SHOWN}}"
    return "not valid UTF-8" if isinstance(value, str) else _type(value)


def _type(value: object) -> str:
    return f"a value of type {type(value).__name__}"
