"""The one model this router serves: its name, its text side, and the limits its replicas report."""

import logging
from array import array
from collections.abc import Callable

from ostrya.errors import InvalidRequest, NoReplica
from ostrya.router.convert import Limits, Prompt
from ostrya.router.fleet import Fleet
from ostrya.router.offload import Offload
from ostrya.router.types import ReplicaState
from ostrya.text.chat import Chat, ChatTemplate, Message, fresh_mark
from ostrya.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_REFRESH_S = 1.0
"""How old limits may get: they change only when replicas with other settings join."""

_UNKNOWN_CONTEXT = 2**31 - 1
"""Until a replica has ever been known; it checks again."""

_LONG_CHARS_PER_TOKEN = 16
"""Natural text has one to six characters a token; what is longer than this times the context hardly ever fits."""

_WHOLE_CHARS = 1 << 18
"""So much is tokenized in one go, whatever the context: some ten megabytes of memory."""

_SLICE_CHARS = 16_384


class ServedModel:
    """Shared by all requests."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        fleet: Fleet,
        offload: Offload,
        clock: Callable[[], float],
        allow_special_tokens_in_content: bool = False,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._template = ChatTemplate(
            tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )
        if self._template.problem:
            fields = {"why": self._template.problem}
            log.warning("chat is refused; text and token ids are served", extra={"fields": fields})
        self._trusts_content = allow_special_tokens_in_content
        self._fleet = fleet
        self._offload = offload
        self._clock = clock
        self._limits: Limits | None = None
        self._limits_at = 0.0

    def limits(self) -> Limits:
        """What every ready replica takes; while there is none, what was last known of any, ready or not."""
        now = self._clock()
        if self._limits is None or now - self._limits_at >= _REFRESH_S:
            rows = self._fleet.replicas()
            ready = [row.info for row in rows if row.state is ReplicaState.READY]
            infos = ready or ([row.info for row in rows] if self._limits is None else [])
            if infos:
                self._limits = Limits(
                    context_tokens=min(info.context_tokens for info in infos),
                    vocab_size=min(info.vocab_size for info in infos),
                )
            if ready:
                self._limits_at = now
        return self._limits or Limits(context_tokens=_UNKNOWN_CONTEXT, vocab_size=self.tokenizer.vocab_size)

    def num_ready(self) -> int:
        """Routable replicas."""
        return len(self._fleet.snapshot().replicas)

    async def tokens(self, prompt: Prompt) -> "array[int]":
        """The prompt's token ids. InvalidRequest if the template refuses the messages, or the text is far too long;
        NoReplica if it is long and no replica has ever told what is too long.

        Off the event loop, because a long text takes milliseconds; a cancelled request's thread ends by itself.
        """
        if isinstance(prompt, array):
            return prompt
        context_tokens = self.limits().context_tokens
        if isinstance(prompt, str):
            return await self._offload.in_thread(lambda: self._encode(prompt, context_tokens), num_bytes=len(prompt))
        num_bytes = sum(len(message.content) for message in prompt.messages)
        return await self._offload.in_thread(lambda: self._encode_chat(prompt, context_tokens), num_bytes=num_bytes)

    async def sequences(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The tokens that words become, with a space before them and without."""
        if not words:
            return ()
        num_bytes = sum(map(len, words))
        return await self._offload.in_thread(lambda: self._sequences(words), num_bytes=num_bytes)

    def _sequences(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        spellings = [text for word in words for text in (word, f" {word}")]
        found = (tuple(self.tokenizer.encode_inside(text)) for text in spellings)
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def _encode(self, text: str, context_tokens: int) -> "array[int]":
        self._refuse_hopeless(text, context_tokens)
        return array("I", self.tokenizer.encode(text))

    def _encode_chat(self, chat: Chat, context_tokens: int) -> "array[int]":
        mark = fresh_mark()
        messages = chat.messages if self._trusts_content else tuple(self._marked(one, mark) for one in chat.messages)
        text = self._template.render(messages, continue_final_message=chat.continue_final_message)
        if mark not in text:
            self._refuse_hopeless(text, context_tokens)
            return array("I", self.tokenizer.encode(text, add_prefix=False))
        self._refuse_hopeless(text.replace(mark, ""), context_tokens)
        return array("I", self.tokenizer.encode_marked(text, mark))

    def _marked(self, message: Message, mark: str) -> Message:
        content = self.tokenizer.mark(message.content, mark)
        return message if content is message.content else Message(role=message.role, content=content)

    def _refuse_hopeless(self, text: str, context_tokens: int) -> None:
        """Counts a very long text slice by slice: 8 MB tokenized in one go would take seconds and gigabytes."""
        if len(text) <= min(_LONG_CHARS_PER_TOKEN * context_tokens, _WHOLE_CHARS):
            return
        if context_tokens == _UNKNOWN_CONTEXT:
            raise NoReplica(
                f"no replica has told yet how long a prompt may be, and this one has {len(text)} characters"
            )
        num_tokens = 0
        for first in range(0, len(text), _SLICE_CHARS):
            # Cutting inside a word adds a token or two, so a little less is counted.
            num_tokens += len(self.tokenizer.encode(text[first : first + _SLICE_CHARS], add_prefix=False)) - 2
            if num_tokens >= context_tokens:
                raise InvalidRequest(
                    "prompt",
                    f"more than {num_tokens} tokens long ({len(text)} characters)",
                    f"at most {context_tokens - 1}, one below the context of {context_tokens}",
                )
