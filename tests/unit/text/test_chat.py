"""Chat messages are rendered by the model's own template, in a sandbox, as transformers renders them."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostrya.errors import InvalidRequest
from ostrya.text.chat import ChatTemplate, Message
from ostrya.text.tokenizer import Tokenizer

KNOWN = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
"""In the shapes that known families of models have; written for these tests."""

HELLO = (Message(role="user", content="hello"),)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LONG_TEXT = "A line with <tags>, 'quotes', 数字 and\n\n\tspace. " * 25_000
CHATS = {
    "hello": HELLO,
    "a system message and a tool": (
        Message(role="system", content=" Be brief. /no_think "),
        Message(role="user", content=' "Wie geht\'s?" <b>&amp;</b> '),
        Message(role="assistant", content="<think>\nhm\n</think>\n\nGut.\n"),
        Message(role="tool", content='{"ä": [1, 2]}\n'),
        Message(role="user", content="{{ 1 + 1 }} {% raw %}"),
    ),
    "an answer": (*HELLO, Message(role="assistant", content="\nHi, <think>a</think> \n")),
    "200 messages": tuple(
        Message(role="assistant" if number % 2 else "user", content=f"<think>{number}</think> " * 30)
        for number in range(200)
    ),
    "a megabyte": (Message(role="user", content=LONG_TEXT), Message(role="assistant", content=LONG_TEXT), *HELLO),
}


class Training(Extension):
    """The block as transformers has it: the call of a macro."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def as_transformers_renders(source: str, messages: tuple[Message, ...], *, add_generation_prompt: bool = True) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Training, LoopControlExtension]
    )

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return environment.from_string(source).render(
        messages=turns, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **SPECIAL
    )


def test_the_rendered_chat_equals_that_of_transformers(tokenizer: Tokenizer) -> None:
    golden = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text())["chat"]
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    assert template.render([Message(**message) for message in golden["messages"]]) == golden["text"]


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("chat", CHATS)
def test_templates_of_known_families_render_as_in_transformers(family: str, chat: str) -> None:
    template, messages = ChatTemplate(KNOWN[family], **SPECIAL), CHATS[chat]
    assert template.problem == ""
    refusal = ""
    try:
        expected = as_transformers_renders(KNOWN[family], messages)
    except jinja2.TemplateError as error:
        refusal = str(error)
    if not refusal:
        assert template.render(messages) == expected
        return
    with pytest.raises(InvalidRequest) as refused:
        template.render(messages)
    assert refusal in str(refused.value)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("{'b': 'ä', 'a': [1]} | tojson", '{"b": "ä", "a": [1]}'),
        ("{'b': 'ä', 'a': [1]} | tojson(ensure_ascii=true)", '{"b": "\\u00e4", "a": [1]}'),
        ("{'b': 'ä', 'a': [1]} | tojson(separators=(',', ':'), sort_keys=true)", '{"a":[1],"b":"ä"}'),
        ("{'b': 'ä', 'a': [1]} | tojson(indent=1)", '{\n "b": "ä",\n "a": [\n  1\n ]\n}'),
        ("'<b> & \\'c\\'' | tojson", "\"<b> & 'c'\""),
    ],
)
def test_tojson_is_that_of_transformers(expression: str, text: str) -> None:
    assert ChatTemplate(f"{{{{ {expression} }}}}").render(HELLO) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a-b-c'.split('-', 1)[1] ~ 'a b  c'.split() | join('+') ~ 'a-b-c'.rsplit('-', maxsplit=1) | length }}",
        "{{ ['b', 'A', 'c', 'b'] | unique | sort | reverse | map('upper') | join(',') }}",
        "{{ [{'n': 2}, {'n': 1}] | sort(attribute='n') | map(attribute='n') | list | tojson }}",
        "{{ {'b': 1, 'a': 2} | dictsort | first | last }}{{ {'a': 1}.items() | list | string }}",
        "{{ {'a': 1} | items | list }}{{ {'a': 1}.get('b', 2) }}{{ {'a': [1]}.a[0] }}{{ dict(a=1) }}",
        "{{ '%s has %05.1f%%' % ('x', 2) }}{{ '%s' | format('y') }}{{ 'ab cd' | title }}",
        "{{ 'a\nb' | indent(2, first=true) }}{{ 'a\n\nb' | indent('> ', blank=true) }}",
        "{{ 'a b c' | truncate(3, leeway=0) }}",
        "{{ 7 // 2 }}{{ -7 % 3 }}{{ 2 ** 10 }}{{ 1 / 4 }}{{ 2.5 | round | int }}{{ '12' | int + 1 }}{{ 'a' * 3 }}",
        "{% set x %}<{{ 'a' }}>{% endset %}{{ x | e }}{{ x | safe }}{% filter upper %}b{{ x }}{% endfilter %}",
        "{% for k, v in {'a': [1, 2]}.items() if v %}{{ loop.cycle('x', 'y') }}{{ k }}{{ v }}{% endfor %}",
        "{% for k in [] %}{{ k }}{% else %}none{% endfor %}",
        "{% for i in range(3) %}{{ loop.changed(i // 2) }}{% endfor %}",
        "{% macro f(a, b='c') %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}{% call f(1) %}!{% endcall %}",
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }},{% endfor %}",
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{{ m | tojson }}{% break %}{% endfor %}",
        "{% set j = joiner(', ') %}{% set c = cycler(1, 2) %}{{ j() }}{{ j() }}{{ c.next() }}{{ c.next() }}",
        "{% with a = 1, b = [1] %}{{ a in b }}{{ (1, 2) == (1, 2) }}{{ 'b' in 'abc' }}{{ 3 is odd }}{% endwith %}",
        "{{ 1 < 2 < 3 }}{{ messages == messages[:] }}{{ 'a' < 'b' }}{{ {'a': 1} == {'a': 1} }}{{ 1 not in [2] }}",
        "{{ messages | selectattr('role', 'in', ['user']) | rejectattr('content', 'undefined') | list | length }}",
        "{{ messages[-1:][0].content[1:-1] }}{{ messages.nothing is defined }}{{ nothing }}",
        "{{ [nothing, none, 1.5, true] }}",
        "{{ 'a b c'.split(maxsplit=1) }}{{ 'a b c'.rsplit(None, 1) }}{{ 'abc' | reverse }}{{ '%(a)s' % {'a': 1} }}",
        "{{ 'aXbX'.replace('X', '--', 1) }}{{ 'ab' | replace('b', 'c') }}{{ 'a,b'.partition(',') }}",
        "{{ 'a\r\nb\x0bc'.splitlines() }}{{ ' ab '.strip(' b') }}{{ 'ab'.find('b') }}{{ 'ab'.removeprefix('a') }}",
    ],
)
def test_what_templates_may_say_means_what_it_means_in_jinja2(source: str) -> None:
    assert ChatTemplate(source).render(HELLO) == as_transformers_renders(source, HELLO)


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HELLO)


def test_a_model_without_a_template_refuses_chat() -> None:
    with pytest.raises(InvalidRequest, match="no chat template; use text"):
        ChatTemplate(None).render(HELLO)


def test_a_broken_template_refuses_chat_and_says_why() -> None:
    template = ChatTemplate("{% for %}")
    assert template.problem == (
        "the model's chat template cannot be used (line 1: Expected an expression, got 'end of statement block')"
    )
    with pytest.raises(InvalidRequest, match="line 1: Expected an expression"):
        template.render(HELLO)


def test_the_time_is_what_the_template_asks_for() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO)) == 4


OPEN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TRIMMING = OPEN.replace("m.content", "m.content | trim")


@pytest.mark.parametrize(
    ("source", "begun", "prompt"),
    [
        (OPEN, "Sure, ", "<user>hello<end><assistant>Sure, "),
        (OPEN, " <end> and on\n", "<user>hello<end><assistant> <end> and on\n"),
        (TRIMMING, "  Sure, \n", "<user>hello<end><assistant>Sure,"),
        (KNOWN["trl"], "Sure", "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nSure"),
    ],
)
def test_the_last_message_stays_open_when_it_is_to_be_continued(source: str, begun: str, prompt: str) -> None:
    messages = (*HELLO, Message(role="assistant", content=begun))
    assert ChatTemplate(source).render(messages, continue_final_message=True) == prompt
    assert ChatTemplate(source).render(messages).endswith(("<end><a>", "<|im_end|>\n<|im_start|>assistant\n"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        OPEN.replace("m.content", "m.content.split('>')[-1]"),
        OPEN.replace("{{ m.content }}", "{{ m.content }}, {{ m.content }}"),
    ],
)
def test_a_last_message_that_the_template_does_not_keep_as_it_is_cannot_be_continued(source: str) -> None:
    messages = (*HELLO, Message(role="assistant", content="<think>a</think>b"))
    with pytest.raises(InvalidRequest, match="drops, alters or writes twice"):
        ChatTemplate(source).render(messages, continue_final_message=True)
