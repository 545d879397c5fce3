"""Who answers for a replica, and who does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ostrya.router import question
from ostrya.router.question import STRANGERS, Questions
from ostrya.router.types import WorkerId
from tests.fakes.redis_server import free_port
from tests.fakes.waiting import until
from tests.fakes.worker import FakeWorker, Identity

W0 = WorkerId("w0")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "PERIOD_S", 0.05)
    monkeypatch.setattr(question, "DEADLINE_S", 0.5)


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[Questions]:
    """Asks w0 there; afterwards nobody is asked any more."""
    questions = Questions(pool="default", max_message_bytes=1 << 20)
    questions.ask({W0: address})
    try:
        yield questions
    finally:
        await questions.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("question")]


async def test_a_replica_answers_for_itself_until_it_hangs_and_again_when_it_does_not() -> None:
    async with FakeWorker() as worker, asking(worker.address) as questions:
        assert not questions.answers(W0)
        await until(lambda: questions.answers(W0))
        worker.answer.close()
        await until(lambda: not questions.answers(W0))
        worker.answer.open()
        await until(lambda: questions.answers(W0))


async def test_one_missed_answer_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, True, False, False, True])
    seen: list[bool] = []

    async def is_there(questions: Questions, worker_id: WorkerId, address: str) -> bool:
        seen.append(questions.answers(worker_id))
        return next(answers)

    monkeypatch.setattr(Questions, "_is_there", is_there)
    monkeypatch.setattr(question, "PERIOD_S", 0.0)
    async with asking("127.0.0.1:1"):
        await until(lambda: len(seen) >= 6)
    assert seen[:6] == [False, True, True, True, True, False]


@pytest.mark.parametrize("identity", [Identity(worker_id="w1"), Identity(pool="other")])
async def test_nobody_else_at_the_address_answers_for_it(identity: Identity) -> None:
    async with FakeWorker(identity) as worker, asking(worker.address) as questions:
        with pytest.raises(AssertionError, match="did not hold"):
            await until(lambda: questions.answers(W0), timeout_s=0.5)


async def test_a_worker_that_is_cordoned_answers_nobody_listening_does_not() -> None:
    async with FakeWorker() as worker:
        await worker.set_serving(False)
        async with asking(worker.address) as questions:
            await until(lambda: questions.answers(W0))
            questions.ask({W0: f"127.0.0.1:{free_port()}"})
            assert not questions.answers(W0)
            with pytest.raises(AssertionError, match="did not hold"):
                await until(lambda: questions.answers(W0), timeout_s=0.3)
            questions.ask({})
            assert not questions.answers(W0)


async def test_a_question_that_broke_is_no_answer_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_there(questions: Questions, worker_id: WorkerId, address: str) -> bool:
        if questions.answers(worker_id):
            raise RuntimeError("a fault of ours")
        return True

    monkeypatch.setattr(Questions, "_is_there", is_there)
    monkeypatch.setattr(question, "PERIOD_S", 0.0)
    async with asking("127.0.0.1:1") as questions:
        task = questions._open[W0].task
        await until(task.done)
        questions.ask({W0: "127.0.0.1:1"})
        assert questions._open[W0].task is not task
        assert not questions.answers(W0)


class Counting:
    """In the place of `_is_there`: answers nobody until told, and knows how many it is asked about at a time."""

    def __init__(self) -> None:
        self.open, self.most, self.asked = 0, 0, set[WorkerId]()
        self.go_on = asyncio.Event()

    async def is_there(self, _: Questions, worker_id: WorkerId, address: str) -> bool:
        self.asked.add(worker_id)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.go_on.wait()
        finally:
            self.open -= 1
        return False


async def test_of_a_thousand_strangers_few_are_asked_at_a_time_and_nobody_else_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = Counting()
    monkeypatch.setattr(Questions, "_is_there", lambda *given: counting.is_there(*given))
    strangers = {WorkerId(f"x{number}"): "127.0.0.1:1" for number in range(1_000)}
    async with asking("127.0.0.1:1") as questions:
        questions.ask(strangers | {W0: "127.0.0.1:1"}, strangers=strangers.keys())
        await until(lambda: counting.open == STRANGERS + 1)
        assert W0 in counting.asked
        assert questions.is_pending(W0)
        assert not any(map(questions.is_pending, strangers)), "they leave without an answer, and may come back with one"
        questions.ask(strangers, strangers=strangers.keys() - {WorkerId("x999")})
        await until(lambda: WorkerId("x999") in counting.asked)
        assert questions.is_pending(WorkerId("x999")), "it is in the fleet now"
        counting.go_on.set()
        await until(lambda: len(counting.asked) > 50)
        assert counting.most == STRANGERS + 1


async def test_a_fleet_that_loses_its_leases_together_is_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, turns, began = Counting(), 0, list[int]()

    async def is_there(_: Questions, worker_id: WorkerId, address: str) -> bool:
        began.append(turns)
        return await counting.is_there(_, worker_id, address)

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Questions, "_is_there", is_there)
    other = asyncio.create_task(bystander())
    async with asking("127.0.0.1:1") as questions:
        questions.ask({WorkerId(f"w{number}"): "127.0.0.1:1" for number in range(50)})
        await until(lambda: counting.open == 50)
    other.cancel()
    assert len(set(began)) == len(began), "others had the event loop in between"
