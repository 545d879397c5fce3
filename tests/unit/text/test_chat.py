"""Chat messages are rendered by the model's own template, in a sandbox."""

import json
from pathlib import Path

import pytest

from ostrya.errors import InvalidRequest, ModelLoadError
from ostrya.text.chat import ChatTemplate, Message
from ostrya.text.tokenizer import Tokenizer

HELLO = (Message(role="user", content="hello"),)


def test_the_rendered_chat_equals_that_of_transformers(tokenizer: Tokenizer) -> None:
    golden = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text())["chat"]
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    assert template.render([Message(**message) for message in golden["messages"]]) == golden["text"]


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HELLO)


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ messages[7].role.x }}", "{{ 1 / 0 }}"])
def test_whatever_a_template_does_wrong_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(HELLO)


def test_a_model_without_a_template_refuses_chat() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None).render(HELLO)


def test_a_broken_template_is_found_at_load() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_the_sandbox_keeps_a_template_from_python_and_from_its_input(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(HELLO)


def test_templates_have_the_names_that_transformers_gives_them() -> None:
    source = "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
    assert ChatTemplate(source).render(HELLO) == '{"role": "user", "content": "hello"}'
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO)) == 4
