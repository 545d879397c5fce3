"""Protobuf at the edge only: client requests become typed values here, checked; worker requests are made here.

Every refusal names field, value and allowed range. What needs the prompt's length is checked by `check_length` once the
text has become tokens.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ostrya.api.v1 import common_pb2, inference_pb2, worker_pb2
from ostrya.errors import InvalidRequest, UnknownModel
from ostrya.text.chat import Message

MAX_TEMPERATURE = 100.0
MAX_STOPS = 16
MAX_STOP_BYTES = 256
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the pool's model takes."""

    context_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What the client asked for; None = absent, for the worker to decide."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    max_tokens: int | None
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool | None


Prompt: TypeAlias = "str | tuple[Message, ...] | array[int]"
"""Plain text, chat messages, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked request for an answer."""

    prompt: Prompt
    sampling: Sampling
    stop: tuple[str, ...]


def asked(request: inference_pb2.GenerateRequest, *, model: str, limits: Limits, draw_seed: Callable[[], int]) -> Asked:
    """The typed request. InvalidRequest or UnknownModel, naming what is wrong; a seed is drawn if there is none."""
    check_model(request.model, known=model)
    return Asked(
        prompt=_prompt(request, limits),
        sampling=_sampling(request.sampling, limits, draw_seed),
        stop=_stop(request.stop),
    )


def text_prompt(request: inference_pb2.TokenizeRequest, *, model: str) -> str | tuple[Message, ...]:
    """What is to be tokenized."""
    check_model(request.model, known=model)
    given = [name for name, there in (("text", request.HasField("text")), ("messages", request.messages)) if there]
    _exactly_one(given, "text, messages")
    return request.text if given == ["text"] else _messages(request.messages)


def check_model(name: str, *, known: str) -> None:
    """UnknownModel unless `name` is the pool's model, or empty."""
    if name and name != known:
        raise UnknownModel(name, (known,))


def check_length(num_tokens: int, *, max_tokens: int | None, limits: Limits) -> None:
    """Whether a prompt of `num_tokens` and its answer fit the context. InvalidRequest otherwise."""
    context = limits.context_tokens
    if num_tokens == 0:
        raise InvalidRequest("prompt", "0 tokens (empty)", "at least 1 token")
    if num_tokens >= context:
        raise InvalidRequest(
            "prompt", f"{num_tokens} tokens long", f"at most {context - 1}, one below the context of {context}"
        )
    if max_tokens is not None and num_tokens + max_tokens > context:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"{max_tokens} with a prompt of {num_tokens} tokens",
            f"at most {context - num_tokens} with this prompt, as the context has {context} tokens",
        )


def _prompt(request: inference_pb2.GenerateRequest, limits: Limits) -> Prompt:
    there = (
        ("text", request.HasField("text")),
        ("messages", len(request.messages) > 0),
        ("token_ids", len(request.token_ids) > 0),
    )
    given = [name for name, is_there in there if is_there]
    _exactly_one(given, "text, messages, token_ids")
    if given == ["token_ids"]:
        return _token_ids(request.token_ids, "token_ids", limits)
    if given == ["messages"]:
        return _messages(request.messages)
    if not request.text:
        raise InvalidRequest("text", "empty", "at least one character")
    return request.text


def _exactly_one(given: Sequence[str], kinds: str) -> None:
    if len(given) != 1:
        raise InvalidRequest("prompt", f"given as {' and '.join(given) or 'nothing'}", f"exactly one of {kinds}")


def _messages(messages: Sequence[inference_pb2.ChatMessage]) -> tuple[Message, ...]:
    for position, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"messages[{position}].role", repr(message.role[:32]), ", ".join(ROLES))
    if not messages[-1].content:
        raise InvalidRequest(f"messages[{len(messages) - 1}].content", "empty", "at least one character")
    return tuple(Message(role=message.role, content=message.content) for message in messages)


def _token_ids(token_ids: Sequence[int], field: str, limits: Limits) -> "array[int]":
    packed = array("I", token_ids)
    if packed and max(packed) >= limits.vocab_size:
        position, value = next((i, id) for i, id in enumerate(packed) if id >= limits.vocab_size)
        raise InvalidRequest(f"{field}[{position}]", value, f"0 to {limits.vocab_size - 1}, the model's vocabulary")
    return packed


def _sampling(sampling: common_pb2.SamplingParams, limits: Limits, draw_seed: Callable[[], int]) -> Sampling:
    temperature = sampling.temperature if sampling.HasField("temperature") else None
    if temperature is not None and not 0 <= temperature <= MAX_TEMPERATURE:  # false for NaN too
        raise InvalidRequest("sampling.temperature", _number(temperature), f"[0, {MAX_TEMPERATURE:g}]")
    top_p = sampling.top_p if sampling.HasField("top_p") else None
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidRequest("sampling.top_p", _number(top_p), "(0, 1]")
    top_k = sampling.top_k if sampling.HasField("top_k") else None
    if top_k is not None and top_k < 0:
        raise InvalidRequest("sampling.top_k", top_k, "0 (all) or more")
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens", max_tokens, "1 or more, or absent for what the context has left")
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=sampling.seed if sampling.HasField("seed") else draw_seed(),
        max_tokens=max_tokens,
        stop_token_ids=tuple(_token_ids(sampling.stop_token_ids, "sampling.stop_token_ids", limits)),
        ignore_eos=sampling.ignore_eos if sampling.HasField("ignore_eos") else None,
    )


def _number(value: float) -> str:
    """Nine digits tell every float32 from its neighbours, and so from the limit."""
    return f"{value:.9g}"


def _stop(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOPS:
        raise InvalidRequest("stop", f"{len(stop)} strings", f"at most {MAX_STOPS}")
    for position, text in enumerate(stop):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidRequest(f"stop[{position}]", f"{size} bytes long", f"1 to {MAX_STOP_BYTES} bytes")
    return tuple(dict.fromkeys(stop))


def worker_request(
    *, request_id: str, model: str, prompt: Sequence[int], received: Sequence[int], sampling: Sampling, namespace: str
) -> worker_pb2.WorkerServiceGenerateRequest:
    """The request for a worker to go on after `received`: noise is keyed by absolute position, so the seed stays."""
    params = common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - len(received),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )
    request = worker_pb2.WorkerServiceGenerateRequest(
        request_id=request_id, model=model, token_ids=prompt, sampling=params, cache_namespace=namespace
    )
    request.token_ids.extend(received)
    return request
