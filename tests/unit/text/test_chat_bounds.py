"""Whatever a template is and does, at load or in use: one line that says so, soon, and in little memory."""

import resource
import time

import pytest

from ostrya.errors import InvalidRequest
from ostrya.text.chat import ChatTemplate, Message
from tests.unit.text.templates_nasty import REFUSED

MAX_CPU_S = 3.0
"""Of this thread; each takes less than one where nobody disturbs it."""

MAX_GROWTH_MB = 400


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_asks_for_too_much_is_refused_in_one_line(name: str) -> None:
    started, grown_from = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate(REFUSED[name])
    with pytest.raises(InvalidRequest) as refused:
        template.render([Message(role="user", content="hello")])
    said = str(refused.value)
    assert said.isprintable()
    assert len(said) < 500
    assert template.problem.isprintable()
    assert time.thread_time() - started < MAX_CPU_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown_from) / 1024 < MAX_GROWTH_MB


def test_a_template_may_not_multiply_what_the_request_brought() -> None:
    started, grown_from = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = "{% for m in messages %}{% for n in messages %}{{ n.content ~ m.content }}{% endfor %}{% endfor %}"
    messages = [Message(role="user", content="x" * 10_000)] * 200
    with pytest.raises(InvalidRequest, match="than a chat of this size may need"):
        ChatTemplate(source).render(messages)
    assert time.thread_time() - started < MAX_CPU_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown_from) / 1024 < MAX_GROWTH_MB


def test_a_budget_is_of_one_rendering() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% for m in messages %}{% endfor %}{% endfor %}")
    for _ in range(4):  # each takes a third of it
        template.render([Message(role="user", content="hello")])
