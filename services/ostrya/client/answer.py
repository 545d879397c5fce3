"""What a stream has said so far. Both clients' streams fill one of these; no I/O here."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ostrya.api.v1 import common_pb2, inference_pb2

FinishReason: TypeAlias = Literal["stop", "length"]

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one message added; either part may be empty."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were reused."""


class Answer:
    """Everything about an answer except its chunks. `usage` and `finish_reason` are there once it has ended."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None
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
        self.finish_reason = _FINISH_REASONS.get(response.finish_reason, self.finish_reason)
        if response.HasField("usage"):
            self.usage = Usage(
                prompt_tokens=response.usage.prompt_tokens,
                completion_tokens=response.usage.completion_tokens,
                cached_tokens=response.usage.cached_tokens,
            )
        return Chunk(text=response.text, token_ids=tuple(response.token_ids))
