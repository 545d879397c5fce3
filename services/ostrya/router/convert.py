"""Protobuf at the edge only: client requests become typed values here, checked; worker requests are made here.

Every refusal names field, value and allowed range. `refuse_giant` comes first and costs the same for any request; the
rest goes through what it let pass, in slices, so that it may run in a thread (offload.py). What needs the prompt's
length is checked by `check_length` once the text has become tokens.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from struct import pack
from typing import TypeAlias, TypeVar

from ostrya.api.v1 import common_pb2, inference_pb2, worker_pb2
from ostrya.errors import InvalidRequest, UnknownModel
from ostrya.service.bounds import (
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    check_name,
    check_number,
    check_priority,
)
from ostrya.service.sampling import check_numbers, check_ranges, has
from ostrya.text.chat import Chat, Message

N = TypeVar("N")

MAX_STOPS = 16
MAX_STOP_BYTES = 256
ROLES = ("system", "user", "assistant", "developer", "tool")

_ID_BYTES = 4
"""What a token id counts towards `max_prompt_bytes`; as text it would be about as much."""

_MESSAGE_BYTES = 64
"""What going through a message costs besides its text, as bytes of text."""

_SLICE = 16_384
"""Token ids that are packed in one go: a third of a millisecond in which no other thread runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one request may bring, whatever the model takes (settings.py)."""

    max_messages: int
    max_prompt_bytes: int


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
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: common_pb2.StructuredOutput | None = None
    """Checked for its size; a worker says whether it makes sense."""

    def of_choice(self, choice: int) -> "Sampling":
        """For one of n answers: noise of its own, and the prompt's log probabilities only once."""
        return self if choice == 0 else replace(self, seed=_choice_seed(self.seed, choice), prompt_logprobs=None)


Prompt: TypeAlias = "str | Chat | array[int]"
"""Plain text, chat messages, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked request for an answer."""

    prompt: Prompt
    sampling: Sampling
    stop: tuple[str, ...]
    bad_words: tuple[str, ...]
    num_choices: int
    priority: int


def refuse_giant(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, *, bounds: Bounds, limits: Limits
) -> None:
    """InvalidRequest if a list is longer than it may be. After it, going through the request is bounded work."""
    check_number("messages", request.messages, bounds.max_messages, "messages")
    if isinstance(request, inference_pb2.GenerateRequest):
        check_number("stop", request.stop, MAX_STOPS, "strings")
        check_number("bad_words", request.bad_words, MAX_BAD_WORDS, "words")
        check_numbers(request.sampling)
        check_number("token_ids", request.token_ids, bounds.max_prompt_bytes // _ID_BYTES, "ids")
        if len(request.token_ids) >= limits.context_tokens:
            check_length(len(request.token_ids), max_tokens=None, limits=limits)


def request_bytes(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> int:
    """What going through the request costs, as bytes of text."""
    return request.ByteSize() + _MESSAGE_BYTES * len(request.messages)


def num_choices(request: inference_pb2.GenerateRequest) -> int:
    """How many streams the request is, before anything about it is checked."""
    return min(request.n, MAX_CHOICES) or 1


def asked(
    request: inference_pb2.GenerateRequest,
    *,
    model: str,
    bounds: Bounds,
    limits: Limits,
    draw_seed: Callable[[], int],
) -> Asked:
    """The typed request. InvalidRequest or UnknownModel, naming what is wrong; a seed is drawn if there is none."""
    check_model(request.model, known=model)
    check_priority(request.priority)
    return Asked(
        prompt=_prompt(request, bounds, limits),
        sampling=_sampling(request.sampling, limits, draw_seed),
        stop=_words(request.stop, "stop", MAX_STOP_BYTES),
        bad_words=_words(request.bad_words, "bad_words", MAX_BAD_WORD_BYTES),
        num_choices=_num_choices(request.n),
        priority=request.priority,
    )


def text_prompt(request: inference_pb2.TokenizeRequest, *, model: str, bounds: Bounds) -> str | Chat:
    """What is to be tokenized."""
    check_model(request.model, known=model)
    given = [name for name, there in (("text", request.HasField("text")), ("messages", request.messages)) if there]
    _exactly_one(given, "text, messages")
    if given == ["messages"]:
        return _chat(request, bounds)
    _check_nothing_to_continue(request)
    return _text(request.text, bounds)


def tokenized(token_ids: "array[int]") -> inference_pb2.TokenizeResponse:
    """The answer to Tokenize."""
    response = inference_pb2.TokenizeResponse()
    for first in range(0, len(token_ids), _SLICE):
        response.token_ids.extend(token_ids[first : first + _SLICE])
    return response


def check_model(name: str, *, known: str) -> None:
    """UnknownModel unless `name` is the pool's model, or empty; InvalidRequest if no model could be called so."""
    if name and name != known:
        check_name("model", name)
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


def _prompt(request: inference_pb2.GenerateRequest, bounds: Bounds, limits: Limits) -> Prompt:
    there = (
        ("text", request.HasField("text")),
        ("messages", len(request.messages) > 0),
        ("token_ids", len(request.token_ids) > 0),
    )
    given = [name for name, is_there in there if is_there]
    _exactly_one(given, "text, messages, token_ids")
    if given == ["messages"]:
        return _chat(request, bounds)
    _check_nothing_to_continue(request)
    if given == ["token_ids"]:
        return _token_ids(request.token_ids, "token_ids", limits)
    text = _text(request.text, bounds)
    if not text:
        raise InvalidRequest("text", "empty", "at least one character")
    return text


def _text(text: str, bounds: Bounds) -> str:
    check_bytes("text", len(text.encode()), bounds)
    return text


def check_bytes(field: str, num_bytes: int, bounds: Bounds) -> None:
    """InvalidRequest if a prompt has more bytes than it may."""
    if num_bytes > bounds.max_prompt_bytes:
        raise InvalidRequest(field, f"{num_bytes} bytes long", f"at most {bounds.max_prompt_bytes} bytes")


def _exactly_one(given: Sequence[str], kinds: str) -> None:
    if len(given) != 1:
        raise InvalidRequest("prompt", f"given as {' and '.join(given) or 'nothing'}", f"exactly one of {kinds}")


def _chat(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, bounds: Bounds) -> Chat:
    messages = _messages(request.messages, bounds)
    if request.continue_final_message and messages[-1].role != "assistant":
        what = f"true with a last message of role {messages[-1].role!r}"
        raise InvalidRequest("continue_final_message", what, "true only with a last message of role 'assistant'")
    return Chat(messages=messages, continue_final_message=request.continue_final_message)


def _check_nothing_to_continue(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> None:
    if request.continue_final_message:
        raise InvalidRequest("continue_final_message", "true without messages", "true only with messages")


def _messages(messages: Sequence[inference_pb2.ChatMessage], bounds: Bounds) -> tuple[Message, ...]:
    turns, num_bytes = [], 0
    for position, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"messages[{position}].role", repr(message.role[:32]), ", ".join(ROLES))
        turns.append(Message(role=message.role, content=message.content))
        num_bytes += len(turns[-1].content.encode())
    check_bytes("messages", num_bytes, bounds)
    if not turns[-1].content:
        raise InvalidRequest(f"messages[{len(turns) - 1}].content", "empty", "at least one character")
    return tuple(turns)


def _token_ids(token_ids: Sequence[int], field: str, limits: Limits) -> "array[int]":
    packed = array("I")
    for first in range(0, len(token_ids), _SLICE):
        piece = array("I", token_ids[first : first + _SLICE])
        if max(piece) >= limits.vocab_size:
            position, value = next((i, id) for i, id in enumerate(piece, start=first) if id >= limits.vocab_size)
            raise InvalidRequest(f"{field}[{position}]", value, f"0 to {limits.vocab_size - 1}, the model's vocabulary")
        packed += piece
    return packed


def _sampling(sampling: common_pb2.SamplingParams, limits: Limits, draw_seed: Callable[[], int]) -> Sampling:
    check_ranges(sampling, vocab_size=limits.vocab_size)

    def given(name: str, value: N) -> N | None:
        return value if has(sampling, name) else None

    return Sampling(
        temperature=given("temperature", sampling.temperature),
        top_k=given("top_k", sampling.top_k),
        top_p=given("top_p", sampling.top_p),
        seed=sampling.seed if sampling.HasField("seed") else draw_seed(),
        max_tokens=given("max_tokens", sampling.max_tokens),
        stop_token_ids=tuple(_token_ids(sampling.stop_token_ids, "sampling.stop_token_ids", limits)),
        ignore_eos=given("ignore_eos", sampling.ignore_eos),
        min_p=given("min_p", sampling.min_p),
        typical_p=given("typical_p", sampling.typical_p),
        repetition_penalty=given("repetition_penalty", sampling.repetition_penalty),
        presence_penalty=given("presence_penalty", sampling.presence_penalty),
        frequency_penalty=given("frequency_penalty", sampling.frequency_penalty),
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        logprobs=given("logprobs", sampling.logprobs),
        prompt_logprobs=given("prompt_logprobs", sampling.prompt_logprobs),
        structured=given("structured", sampling.structured),
    )


def _words(words: Sequence[str], field_: str, max_bytes: int) -> tuple[str, ...]:
    for position, text in enumerate(words):
        size = len(text.encode())
        if not 1 <= size <= max_bytes:
            raise InvalidRequest(f"{field_}[{position}]", f"{size} bytes long", f"1 to {max_bytes} bytes")
    return tuple(dict.fromkeys(words))


def _num_choices(n: int) -> int:
    if n > MAX_CHOICES:
        raise InvalidRequest("n", n, f"1 to {MAX_CHOICES}")
    return n or 1


def _choice_seed(seed: int, choice: int) -> int:
    digest = sha256(b"choice" + pack("<QQ", seed, choice)).digest()
    return int.from_bytes(digest[:8], "little")


def prompt_message(prompt: "array[int]") -> worker_pb2.WorkerServiceGenerateRequest:
    """The part that all of a request's tries share, for `worker_request` to copy."""
    message = worker_pb2.WorkerServiceGenerateRequest()
    for first in range(0, len(prompt), _SLICE):
        message.token_ids.extend(prompt[first : first + _SLICE])
    return message


def worker_request(
    prompt: worker_pb2.WorkerServiceGenerateRequest,
    *,
    request_id: str,
    model: str,
    received: Sequence[int],
    sampling: Sampling,
    bad_words: Sequence[Sequence[int]] = (),
    priority: int = 0,
    namespace: str,
) -> worker_pb2.WorkerServiceGenerateRequest:
    """The request for a worker to go on after `received`: noise is keyed by absolute position, so the seed stays; what
    counts the output is told how much of it there is."""
    params = common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - len(received),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=max(0, sampling.min_tokens - len(received)) or None,
        logprobs=sampling.logprobs,
        # They come with the first token.
        prompt_logprobs=None if received else sampling.prompt_logprobs,
        structured=sampling.structured,
    )
    request = worker_pb2.WorkerServiceGenerateRequest(
        request_id=request_id,
        model=model,
        sampling=params,
        cache_namespace=namespace,
        num_output_tokens=len(received),
        bad_words=[worker_pb2.TokenSequence(token_ids=word) for word in bad_words],
        priority=priority,
    )
    request.MergeFrom(prompt)
    request.token_ids.extend(received)
    return request
