import io
import time

from rich.console import Console

from ostrya.cli.up import QUESTION, first_answer
from ostrya.errors import InvalidRequest
from tests.fakes.router import FakeRouter


async def first_words(router: FakeRouter) -> str:
    console = Console(file=io.StringIO(), width=200)
    await first_answer(router.target, time.monotonic(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_the_first_answer_is_a_chat(router: FakeRouter) -> None:
    assert "Ironwood is hard." in await first_words(router)
    assert [message.content for message in router.requests[-1].messages] == [QUESTION]


async def test_a_model_that_cannot_chat_continues_the_question_as_text(router: FakeRouter) -> None:
    router.failures = [InvalidRequest("messages", "given", "none, because this model has no chat template; use text")]
    words = await first_words(router)
    assert "Ironwood is hard." in words
    assert "--raw" in words
    assert "no chat template" in words
    assert router.requests[-1].text == QUESTION
