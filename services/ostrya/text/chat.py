"""Chat messages to a prompt, by the model's own template.

The template comes from a model file, so it runs in jinja2's sandbox and can change nothing.
"""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostrya.errors import InvalidRequest, ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn."""

    role: str
    content: str


class ChatTemplate:
    """A model's chat template; None: it has none and chat is refused."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        """ModelLoadError if the template is not valid jinja2."""
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source) if source is not None else None
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that asks for the assistant's next turn. InvalidRequest if the template refuses the messages."""
        if self._template is None:
            raise InvalidRequest("messages", "given", "none, because this model has no chat template; use text")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._special)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template may do to the messages whatever Python can; all of it means that they do not fit.
            raise InvalidRequest(
                "messages", f"refused by the model's chat template ({error})", "what the template takes"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    """The names templates are written against: those of transformers' apply_chat_template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
