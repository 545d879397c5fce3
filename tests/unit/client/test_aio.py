import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ostrya.client import AsyncClient
from ostrya.errors import DeadlineExceeded, EngineDied, InvalidRequest, Overloaded, Unavailable
from ostrya.service import status
from tests.fakes.router import FakeRouter

WAIT_S = 30.0


@pytest_asyncio.fixture
async def client(router: FakeRouter) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(router.target) as client:
        yield client


async def cancelled(router: FakeRouter) -> bool:
    return await asyncio.to_thread(router.cancelled.wait, WAIT_S)


async def test_a_stream_yields_chunks_then_tells_how_it_went(client: AsyncClient) -> None:
    stream = client.generate("What is ironwood?")
    assert [chunk.text async for chunk in stream] == ["Iron", "wood ", "is ", "hard.", ""]
    assert stream.usage is not None
    assert (stream.usage.cached_tokens, stream.finish_reason, stream.decision_id) == (4, "stop", "decision-1")


async def test_errors_are_typed(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.generate("").read()
    assert caught.value.field == "text"


async def test_what_cannot_be_sent_is_refused_at_once(router: FakeRouter, client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.seed is -1"):
        client.generate("hello", seed=-1)
    assert router.requests == []


async def test_pushback_is_followed_before_the_first_message(router: FakeRouter, client: AsyncClient) -> None:
    router.failures = [Overloaded("full", retry_after_s=0.01), Unavailable("down", retry_after_s=0.01)]
    assert await client.generate("hello").read() == "Ironwood is hard."
    router.failures = [Overloaded("full", retry_after_s=0.01)]
    assert await client.tokenize("ab") == [97, 98]


async def test_a_failure_that_the_router_reports_without_an_invitation_is_final(
    router: FakeRouter, client: AsyncClient
) -> None:
    await client.models()
    router.failures = [status.with_retry(Unavailable("three replicas failed it"), None) for _ in range(2)]
    with pytest.raises(Unavailable, match=r"^three replicas failed it$"):
        await client.generate("hello").read()
    assert len(router.requests) == 1


async def test_retry_stops_after_the_first_message(router: FakeRouter, client: AsyncClient) -> None:
    router.fail_after = (1, EngineDied("engine ended", retry_after_s=0.01))
    with pytest.raises(EngineDied):
        await client.generate("hello").read()
    assert len(router.requests) == 1


async def test_the_timeout_ends_a_silent_stream(router: FakeRouter, client: AsyncClient) -> None:
    router.hang_after = 1
    with pytest.raises(DeadlineExceeded):
        await client.generate("hello", timeout_s=0.3).read()


async def test_leaving_the_async_with_block_cancels(router: FakeRouter, client: AsyncClient) -> None:
    router.hang_after = 1
    async with client.generate("hello") as stream:
        await anext(stream)
    assert await cancelled(router)
    assert [chunk async for chunk in stream] == []


async def test_cancelling_the_reading_task_cancels_the_request(router: FakeRouter, client: AsyncClient) -> None:
    router.hang_after = 1
    stream = client.generate("hello")
    await anext(stream)
    reader = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await cancelled(router)


async def test_closing_from_another_task_ends_the_stream(router: FakeRouter, client: AsyncClient) -> None:
    router.hang_after = 1
    stream = client.generate("hello")
    await anext(stream)
    reader = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    stream.close()
    assert await reader == ""


async def test_a_forgotten_stream_cancels(router: FakeRouter, client: AsyncClient) -> None:
    router.hang_after = 1
    stream = client.generate("hello")
    await anext(stream)
    del stream
    gc.collect()
    assert await cancelled(router)


async def test_nobody_there_names_the_target() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
            await client.models()


async def test_replicas_and_explanations_come_as_the_server_says(client: AsyncClient) -> None:
    assert [replica.worker_id for replica in (await client.replicas()).replicas] == ["worker-0"]
    assert (await client.explain("decision-1")).chosen == "worker-0"


async def test_a_worker_is_cordoned_drained_and_uncordoned(router: FakeRouter, client: AsyncClient) -> None:
    await client.cordon("worker-0")
    assert await client.drain("worker-0", drain_timeout_s=1.5) == 0
    await client.uncordon("worker-0")
    assert [what for what, _, _ in router.orders] == ["cordon", "drain", "uncordon"]
    assert router.orders[1] == ("drain", "worker-0", 1.5)
    assert (await client.status()).version == "1.2.3"


async def test_several_answers_are_read_as_one_text_each(client: AsyncClient) -> None:
    assert await client.generate("hi", n=2).read_all() == ["Ironwood is hard.", "IRONWOOD IS HARD."]
    assert await client.generate("hi", n=2).read() == "Ironwood is hard."
