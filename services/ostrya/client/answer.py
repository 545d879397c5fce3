"""What a stream has said so far. Both clients' streams fill one of these; no I/O here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ostrya.api.v1 import common_pb2, inference_pb2

FinishReason: TypeAlias = Literal["stop", "length"]

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """What the model gave one token, natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at its place with theirs, likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one message added; either part may be empty."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, if asked for."""
    choice: int = 0
    """Which of n answers it is a part of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were reused."""
    is_simulated: bool = False
    """Nothing was computed: the tokens mean nothing, and the times they took are predictions."""


class Answer:
    """Everything about an answer except its chunks. `usage` and `finish_reason` are there once it has ended; with n
    answers they are of choice 0, and `ends` has those of all."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None
        self.ends: dict[int, tuple[FinishReason | None, Usage]] = {}
        """By choice, once it has ended."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """One for each prompt token but the first, if asked for; there from the first chunk of choice 0."""
        self.replica = ""
        """The replica that produced the newest tokens."""
        self.decision_id = ""
        self.request_id = ""
        self.started = False
        """A message has come: from here on a retry would repeat text."""

    def absorb(self, response: inference_pb2.GenerateResponse) -> Chunk:
        """Takes one message in and returns what it added."""
        self.started = True
        self.replica = response.replica or self.replica
        self.decision_id = response.decision_id or self.decision_id
        self.request_id = response.request_id or self.request_id
        self.prompt_logprobs = tuple(map(_logprobs, response.prompt_logprobs)) or self.prompt_logprobs
        reason = _FINISH_REASONS.get(response.finish_reason)
        if response.choice == 0:
            self.finish_reason = reason or self.finish_reason
        if response.HasField("usage"):
            usage = Usage(
                prompt_tokens=response.usage.prompt_tokens,
                completion_tokens=response.usage.completion_tokens,
                cached_tokens=response.usage.cached_tokens,
                is_simulated=response.usage.simulated,
            )
            self.ends[response.choice] = reason, usage
            if response.choice == 0:
                self.usage = usage
        return Chunk(
            text=response.text,
            token_ids=tuple(response.token_ids),
            logprobs=tuple(map(_logprobs, response.logprobs)),
            choice=response.choice,
        )


def joined(chunks: Iterable[Chunk]) -> list[str]:
    """The text of each choice, choice 0 first."""
    texts: dict[int, list[str]] = {0: []}
    for chunk in chunks:
        texts.setdefault(chunk.choice, []).append(chunk.text)
    return ["".join(texts[choice]) for choice in sorted(texts)]


def _logprobs(logprobs: common_pb2.TokenLogprobs) -> TokenLogprobs:
    top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    return TokenLogprobs(logprob=logprobs.logprob, top=tuple(top))
