"""Chat messages to a prompt, by the model's own template.

The template comes from a model file and the messages from anybody: sandbox.py bounds what they can do together, and
whatever goes wrong is said in one line.
"""

import datetime
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import jinja2

from ostrya.errors import InvalidRequest
from ostrya.text.sandbox import BoundedEnvironment

_BASE_BYTES = 32 << 20
_BYTES_PER_BYTE = 32
_BASE_CPU_S = 0.8
_CPU_S_PER_MESSAGE = 0.0002
"""Budgets of a rendering. Templates of known families make four to ten bytes for one of the messages, and take 20 us a
message; the base alone is half a million turns of a loop."""

_MESSAGE_BYTES = 256
"""What a message counts without its content."""

_MAX_SHOWN = 200
_MAX_TIME_FORMAT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be answered."""

    messages: tuple[Message, ...]
    continue_final_message: bool = False
    """The last message is the beginning of the answer, and stays open."""


class ChatTemplate:
    """A model's chat template. One that cannot be used refuses chat; nothing else depends on it."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        """None: the model has none. Raises nothing, whatever the template is: see `problem`."""
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = BoundedEnvironment({"raise_exception": _raise, "strftime_now": _strftime_now})
        self._template: jinja2.Template | None = None
        self.problem = "this model has no chat template"
        """Why every chat is refused; empty if it is not."""
        if source is not None:
            try:
                self._template, self.problem = self._environment.load(source), ""
            except Exception as error:  # parsers and compilers fail on nonsense in every way
                self.problem = f"the model's chat template cannot be used ({_in_one_line(error)})"

    def render(self, messages: Sequence[Message], *, continue_final_message: bool = False) -> str:
        """The prompt that asks for the assistant's next turn, or for the rest of the last message.

        InvalidRequest if the template refuses the messages, does anything else than to render them, or costs too much.
        Takes time: not for an event loop.
        """
        if not continue_final_message:
            return self._render(messages, add_generation_prompt=True)
        # Where the message ends in the prompt. The space shows whether the template keeps what a message ends with.
        mark, last = f"{fresh_mark()} ", messages[-1]
        marked = Message(role=last.role, content=last.content + mark)
        text = self._render([*messages[:-1], marked], add_generation_prompt=False)
        before, found, after = text.rpartition(mark.strip())
        is_kept_whole = after.startswith(" ")
        kept, content = (before, last.content) if is_kept_whole else (before.rstrip(), last.content.strip())
        if not found or mark.strip() in kept or not kept.endswith(content):
            what = "true with a last message that the model's chat template drops, alters or writes twice"
            raise InvalidRequest("continue_final_message", what, "false, or a last message that it keeps as it is")
        return kept

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        if self._template is None:
            raise InvalidRequest("messages", "given", f"none, because {self.problem}; use text")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        num_bytes = sum(_MESSAGE_BYTES + message.content.__sizeof__() for message in messages)
        self._environment.meter.start(
            num_bytes=_BASE_BYTES + _BYTES_PER_BYTE * num_bytes,
            cpu_s=_BASE_CPU_S + _CPU_S_PER_MESSAGE * len(messages),
        )
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as error:  # a template may do to the messages whatever Python can
            why = f"refused by the model's chat template ({_in_one_line(error)})"
            raise InvalidRequest("messages", why, "what the template takes") from error


def fresh_mark() -> str:
    """A text that nobody can guess, and that templates leave as it is: digits have no case and need no escape."""
    return str(secrets.randbits(128)).zfill(39)


def _in_one_line(error: Exception) -> str:
    """What an error says, if it says anything, short enough for a header."""
    text = str(error.message if isinstance(error, jinja2.TemplateSyntaxError) else error)
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"line {error.lineno}: {text}"
    shown = "".join(character if character.isprintable() else " " for character in text[:_MAX_SHOWN])
    return " ".join(shown.split()) or type(error).__name__


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(message if isinstance(message, str) else type(message).__name__)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form[:_MAX_TIME_FORMAT])
