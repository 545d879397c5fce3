"""What SamplingParams may say, checked by router and worker alike: a worker does not trust its router."""

from struct import pack, unpack

from google.protobuf.message import Message

from ostrya.api.v1 import common_pb2
from ostrya.errors import InvalidRequest
from ostrya.service.bounds import (
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    check_number,
)

MAX_BIAS = 100.0
"""More than any two logits are apart: it forbids, or leaves nothing else."""

_RANGES = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
}
_SHARES = ("top_p", "typical_p")


def check_numbers(sampling: common_pb2.SamplingParams) -> None:
    """InvalidRequest if a list is longer than it may be; costs the same however long."""
    check_number("sampling.stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids")
    check_number("sampling.logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS, "tokens")
    check_number("sampling.structured.choice", sampling.structured.choice, MAX_GRAMMAR_CHOICES, "choices")


def check_ranges(sampling: common_pb2.SamplingParams, *, vocab_size: int) -> None:
    """InvalidRequest that names the first field out of its range. Stop tokens and what depends on the prompt's length
    are not looked at."""
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        # A float field holds the nearest float32; absent is in range or not looked at. False for NaN too.
        if has(sampling, name) and not _float32(low) <= value <= high:
            raise InvalidRequest(f"sampling.{name}", _shown(value), f"[{low:g}, {high:g}]")
    for name in _SHARES:
        value = getattr(sampling, name)
        if has(sampling, name) and not 0 < value <= 1:
            raise InvalidRequest(f"sampling.{name}", _shown(value), "(0, 1]")
    if sampling.top_k < 0:
        raise InvalidRequest("sampling.top_k", sampling.top_k, "0 (all) or more")
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        allowed = "1 or more, or absent for what the context has left"
        raise InvalidRequest("sampling.max_tokens", sampling.max_tokens, allowed)
    if sampling.min_tokens < 0:
        raise InvalidRequest("sampling.min_tokens", sampling.min_tokens, "0 or more")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("sampling.min_tokens", sampling.min_tokens, f"at most max_tokens ({sampling.max_tokens})")
    if sampling.HasField("structured"):
        check_structure(sampling.structured)
    for token_id, bias in sampling.logit_bias.items():
        if token_id >= vocab_size:
            allowed = f"tokens 0 to {vocab_size - 1}, the model's vocabulary"
            raise InvalidRequest("sampling.logit_bias", f"about token {token_id}", allowed)
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(f"sampling.logit_bias[{token_id}]", _shown(bias), f"[{-MAX_BIAS:g}, {MAX_BIAS:g}]")


def check_prompt_logprobs(num_prompt: int, num_top: int | None) -> None:
    """InvalidRequest if the log probabilities of a prompt would be too many for one message."""
    if num_top is not None and num_prompt * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            "sampling.prompt_logprobs",
            f"{num_top} with a prompt of {num_prompt} tokens",
            f"prompt tokens x (prompt_logprobs + 1) at most {MAX_PROMPT_LOGPROBS}",
        )


def check_structure(structured: common_pb2.StructuredOutput) -> None:
    """InvalidRequest if a form is not exactly one, or larger than it may be. Whether it makes sense, a worker says."""
    kinds = ("json_schema", "regex", "lark")
    sizes = {kind: len(getattr(structured, kind).encode()) for kind in kinds if has(structured, kind)}
    if structured.choice:
        sizes["choice"] = sum(len(text.encode()) for text in structured.choice)
    if len(sizes) != 1:
        allowed = "exactly one of json_schema, regex, choice, lark"
        raise InvalidRequest("sampling.structured", f"{' and '.join(sizes) or 'nothing'}", allowed)
    ((kind, size),) = sizes.items()
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"sampling.structured.{kind}", f"{size} bytes long", f"at most {MAX_GRAMMAR_BYTES} bytes")
    for position, text in enumerate(structured.choice):
        if not text:
            raise InvalidRequest(f"sampling.structured.choice[{position}]", "empty", "1 byte or more")


def has(message: Message, field: str) -> bool:
    """Whether an optional field is there; `HasField` itself takes only names written out."""
    return message.HasField(field)


def _float32(value: float) -> float:
    nearest: float = unpack("f", pack("f", value))[0]
    return nearest


def _shown(value: float) -> str:
    """Nine digits tell every float32 from its neighbours, and so from the limit."""
    return f"{value:.9g}"
