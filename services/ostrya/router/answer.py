"""From parts of tokens to what the client sees: text in whole characters, cut before a stop string, and the usage.

One Answer a choice. A part that adds no showable text is held back and its tokens go with the next message.
"""

from collections.abc import Set

from ostrya.api.v1 import common_pb2, inference_pb2
from ostrya.router.proxy import Part
from ostrya.text.detokenize import Detokenizer

_STOP = common_pb2.FINISH_REASON_STOP
_GOING_ON = common_pb2.FINISH_REASON_UNSPECIFIED


class Answer:
    """What one client has been told."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        request_id: str,
        num_prompt_tokens: int,
        ending_token_ids: Set[int],
        min_tokens: int = 0,
        choice: int = 0,
    ) -> None:
        """`ending_token_ids` are not part of the text when they end the answer; a stop string that is complete within
        `min_tokens` does not."""
        self._detokenizer = detokenizer
        self._request_id = request_id
        self._ending = ending_token_ids
        self._min_tokens = min_tokens
        self._choice = choice
        self._held: list[int] = []
        self._held_logprobs: list[common_pb2.TokenLogprobs] = []
        self._prompt_logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()
        self.usage = common_pb2.Usage(prompt_tokens=num_prompt_tokens)
        self.finished = False

    def add(self, part: Part) -> inference_pb2.GenerateResponse | None:
        """The message that this part makes ready, or None while there is nothing to show."""
        num_before = self.usage.completion_tokens
        text, finish_reason = self._text(part)
        self._held_logprobs += part.logprobs[: self.usage.completion_tokens - num_before]
        self._prompt_logprobs = part.prompt_logprobs or self._prompt_logprobs
        self.usage.cached_tokens = part.cached_tokens
        self.usage.simulated |= part.is_simulated
        self.finished = finish_reason != _GOING_ON
        if not text and not self.finished:
            return None
        response = inference_pb2.GenerateResponse(
            text=text,
            token_ids=self._held,
            finish_reason=finish_reason,
            usage=self.usage if self.finished else None,
            replica=part.worker_id,
            decision_id=part.decision_id,
            request_id=self._request_id,
            logprobs=self._held_logprobs,
            prompt_logprobs=self._prompt_logprobs,
            choice=self._choice,
        )
        self._held, self._held_logprobs, self._prompt_logprobs = [], [], ()
        return response

    def _text(self, part: Part) -> tuple[str, common_pb2.FinishReason.ValueType]:
        pieces: list[str] = []
        ends_by_token = part.finish_reason == _STOP and bool(part.token_ids) and part.token_ids[-1] in self._ending
        for position, token_id in enumerate(part.token_ids, start=1):
            self._held.append(token_id)
            self.usage.completion_tokens += 1
            if ends_by_token and position == len(part.token_ids):
                break
            may_stop = self.usage.completion_tokens > self._min_tokens
            pieces.append(self._detokenizer.push(token_id, may_stop=may_stop))
            if self._detokenizer.stopped:
                return "".join(pieces), _STOP
        if part.finish_reason != _GOING_ON:
            pieces.append(self._detokenizer.finish())
        return "".join(pieces), part.finish_reason
