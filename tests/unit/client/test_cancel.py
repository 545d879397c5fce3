"""Whoever stops reading an answer, at whatever moment and in whatever way, ends the request."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import cast

import grpc
import pytest

from ostrya.api.v1 import inference_pb2, inference_pb2_grpc
from ostrya.client import AsyncClient
from ostrya.client.aio import AsyncStream
from ostrya.client.attempts import Attempts, Peer
from ostrya.client.sync import Stream
from ostrya.errors import Unavailable
from ostrya.service import status
from ostrya.service.server import GrpcServer
from tests.fakes.waiting import until

NUM_FAKE = 10_000
NUM_REAL = 300
"""Over sockets; the loop below was run once with 10,000 of them too."""
LATEST_S = 0.3
"""By then even a hundred requests at once have reached their server."""
AT_ONCE = 100
Response = inference_pb2.GenerateResponse


class FakeCall:
    """A call that takes some turns of the loop to be sent and for each message, and guards what gRPC's own guards:
    receiving, and not the moment between sending and receiving."""

    def __init__(self, turns: random.Random, *, num_messages: int) -> None:
        self.is_cancelled = False
        self._num_messages = num_messages
        self._turns = turns
        self._sending = asyncio.ensure_future(self._some_turns())

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True

    async def __aiter__(self) -> AsyncIterator[Response]:
        await self._sending
        for number in range(self._num_messages + 1):
            try:
                await self._some_turns()
                if number == self._num_messages:
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
            yield Response(text="x")

    async def _some_turns(self) -> None:
        for _ in range(self._turns.randrange(4)):
            await asyncio.sleep(0)


async def read_on(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


async def give_up_at_once(stream: AsyncStream) -> None:
    """What `wait_for` does with no time at all: it cancels a read that has never begun."""
    with suppress(TimeoutError):
        await asyncio.wait_for(anext(stream), 0)


READERS: tuple[Callable[[AsyncStream], Awaitable[object]], ...] = (
    lambda stream: stream.read(),
    anext,
    read_on,
    give_up_at_once,
)


async def cancelled_reader(stream: AsyncStream, turns: random.Random, number: int, *, within_s: float = 0.0) -> None:
    """Reads the stream in one of the ways and is cancelled after a few turns of the loop, or somewhat later."""
    way = READERS[number % len(READERS)]
    reading = asyncio.ensure_future(way(stream))
    # A coroutine of the caller's own must have begun: before that nobody can know what it would read.
    for _ in range(turns.randrange(way in (read_on, give_up_at_once), 8)):
        await asyncio.sleep(0)
    if within_s and way not in (anext, give_up_at_once):  # which would be over
        await asyncio.sleep(turns.uniform(0, within_s))  # the moment is the point
    reading.cancel()
    await asyncio.wait({reading})


async def test_a_cancelled_reader_cancels_its_request_at_whatever_moment() -> None:
    turns, peer = random.Random(9), Peer("nowhere")
    calls: list[FakeCall] = []

    def open_call(_: float | None) -> FakeCall:
        # A read of one message would be over before its cancel, if the message came.
        way = READERS[len(calls) % len(READERS)]
        calls.append(FakeCall(turns, num_messages=0 if way is anext else 3))
        return calls[-1]

    for first in range(0, NUM_FAKE, AT_ONCE):
        streams = [AsyncStream(open_call, Attempts(None, peer=peer), peer) for _ in range(AT_ONCE)]
        await asyncio.gather(
            *(cancelled_reader(stream, turns, first + number) for number, stream in enumerate(streams))
        )
        alive = [number for number, call in enumerate(calls) if not call.is_cancelled]
        assert alive == [], [READERS[number % len(READERS)] for number in alive]
        assert [[chunk async for chunk in stream] for stream in streams] == [[]] * AT_ONCE
        calls.clear()


class EndlessAnswers(inference_pb2_grpc.InferenceServiceServicer):
    """Says one word and then nothing."""

    def __init__(self) -> None:
        self.open = 0
        self.begun = 0

    @status.translated
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: status.Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.open += 1
        self.begun += 1
        try:
            yield Response(text="x")
            await asyncio.Event().wait()
        finally:
            self.open -= 1

    async def Tokenize(self, request: object, context: object) -> inference_pb2.TokenizeResponse:
        raise NotImplementedError

    async def ListModels(self, request: object, context: object) -> inference_pb2.ListModelsResponse:
        raise NotImplementedError


async def test_no_request_outlives_its_cancelled_reader_over_a_socket() -> None:
    turns, answers = random.Random(9), EndlessAnswers()
    server = GrpcServer("127.0.0.1", 0, max_message_bytes=1 << 20, services=())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(answers, server.server)
    port = await server.start()
    await server.set_serving(True)
    streams: list[AsyncStream] = []
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        await anext(client.generate("connected"))

        async def one(number: int) -> None:
            # Kept, so that no garbage collection does what the cancel should have done.
            streams.append(client.generate("hello"))
            await cancelled_reader(streams[-1], turns, number, within_s=LATEST_S)

        for first in range(0, NUM_REAL, AT_ONCE):
            await asyncio.gather(*(one(first + number) for number in range(AT_ONCE)))
        # The server begins requests in their order, so whatever was sent has begun when this one is answered.
        async with client.generate("last", timeout_s=30) as last:
            await anext(last)
        await until(lambda: answers.open == 0, timeout_s=30)
        assert answers.begun > 10
        assert len(streams) == NUM_REAL
    await server.stop(0)


class Ended(grpc.RpcError):
    """A router that invites to another try."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__()
        self._retry_after_s = retry_after_s

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "full"

    def trailing_metadata(self) -> "tuple[grpc._Metadatum, ...]":
        told = status.to_status(Unavailable("full", retry_after_s=self._retry_after_s))
        return cast("tuple[grpc._Metadatum, ...]", ((status.DETAILS, told.SerializeToString()),))


class FailingCall:
    """Ends at once."""

    def __init__(self, retry_after_s: float = 30.0) -> None:
        self._retry_after_s = retry_after_s

    def __next__(self) -> Response:
        raise Ended(self._retry_after_s)

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        raise Ended(self._retry_after_s)

    def cancel(self) -> bool:
        return False


async def test_closing_between_two_tries_opens_no_other_and_ends_the_wait() -> None:
    opened: list[FailingCall] = []

    def open_call(_: float | None) -> FailingCall:
        opened.append(FailingCall())
        return opened[-1]

    peer = Peer("nowhere")
    stream = AsyncStream(open_call, Attempts(None, peer=peer), peer)
    reading = asyncio.ensure_future(stream.read())
    await asyncio.sleep(0)
    stream.close()
    assert await asyncio.wait_for(reading, 10) == ""

    blocking = Stream(open_call, Attempts(None, peer=peer, on_retry=lambda *_: blocking.close()), peer)
    assert await asyncio.wait_for(asyncio.to_thread(blocking.read), 10) == ""
    assert len(opened) == 2


def test_a_call_that_opens_while_its_stream_is_closed_is_cancelled() -> None:
    cancelled: list[FailingCall] = []

    class Call(FailingCall):
        def cancel(self) -> bool:
            cancelled.append(self)
            return True

    def open_call(_: float | None) -> Call:
        if opened:
            stream.close()
        opened.append(Call(retry_after_s=0))
        return opened[-1]

    opened: list[Call] = []
    peer = Peer("nowhere")
    stream = Stream(open_call, Attempts(None, peer=peer), peer)
    assert stream.read() == ""
    assert len(opened) == 2
    assert opened[-1] in cancelled


def test_an_interrupted_read_cancels_the_request() -> None:
    class Call(FailingCall):
        is_cancelled = False

        def __next__(self) -> Response:
            raise KeyboardInterrupt

        def cancel(self) -> bool:
            self.is_cancelled = True
            return True

    call, peer = Call(), Peer("nowhere")
    with pytest.raises(KeyboardInterrupt):
        Stream(lambda _: call, Attempts(None, peer=peer), peer).read()
    assert call.is_cancelled
