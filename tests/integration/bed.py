"""A router over real sockets, fake workers, no Redis: where tests of the request path run."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc
from google.rpc import error_details_pb2, status_pb2

from ostrya.api.v1 import admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from ostrya.router.app import Router
from ostrya.router.settings import RouterSettings
from ostrya.router.types import ReplicaState
from ostrya.service import status
from ostrya.service.server import channel
from ostrya.text.tokenizer import Tokenizer
from tests.fakes.tokenizer import END, byte_tokenizer
from tests.fakes.waiting import until
from tests.fakes.worker import Behaviour, FakeWorker, Identity

TOKENIZER = byte_tokenizer()
Request = inference_pb2.GenerateRequest
Response = inference_pb2.GenerateResponse
Params = common_pb2.SamplingParams
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
# Nobody listens there: these tests are about streams, and a router must serve without Redis.
NO_REDIS = "redis://127.0.0.1:1/0"


@dataclass(slots=True)
class Bed:
    """A router and its workers."""

    router: Router
    workers: list[FakeWorker]
    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"
    admin: "admin_pb2_grpc.AdminServiceAsyncStub"

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting room."""
        return self.router.status().num_waiting

    async def ask(self, request: Request, *, timeout_s: float = 60.0) -> list[Response]:
        return [response async for response in self.inference.Generate(request, timeout=timeout_s)]

    async def admitted(self, number: int) -> None:
        """Waits for that many requests inside the router."""
        await until(lambda: self.router.admission.in_flight == number)

    async def until(self, *, ready: int) -> None:
        """Waits for that many routable replicas."""
        async with asyncio.timeout(60):
            while sum(row.state is ReplicaState.READY for row in self.router.fleet.replicas()) != ready:
                await self.router.fleet.wait_changed()

    async def idle(self) -> None:
        """Waits until nothing is counted anywhere; the timeout says that something leaks."""
        await until(lambda: not self.router.admission.in_flight)
        await until(lambda: not any(row.in_flight for row in self.router.fleet.replicas()))
        for worker in self.workers:
            await worker.until(lambda one: one.active == 0)


def router_of(addresses: tuple[str, ...], settings: RouterSettings, tokenizer: Tokenizer = TOKENIZER) -> Router:
    """In front of these workers; they must be of model `tiny` with the tokenizer's fingerprint."""
    return Router(replace(settings, redis_url=NO_REDIS, static_workers=addresses), name="tiny", tokenizer=tokenizer)


@asynccontextmanager
async def bed(
    *behaviours: Behaviour, settings: RouterSettings | None = None, tokenizer: Tokenizer = TOKENIZER
) -> AsyncIterator[Bed]:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                FakeWorker(
                    Identity(worker_id=f"w{n}", tokenizer_fingerprint=TOKENIZER.fingerprint), behaviour=behaviour
                )
            )
            for n, behaviour in enumerate(behaviours)
        ]
        changes = replace(settings or RouterSettings(no_replica_wait_s=0.2), port=0)
        addresses = tuple(worker.address for worker in workers)
        router = router_of(addresses, changes, tokenizer)
        await stack.enter_async_context(router.serving())
        open_channel = await stack.enter_async_context(channel(f"127.0.0.1:{router.port}", max_message_bytes=16 << 20))
        await open_channel.channel_ready()
        inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(open_channel)
        admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(open_channel)
        made = Bed(router, workers, inference, admin)
        await made.until(ready=len(workers))
        yield made


def text_of(responses: list[Response]) -> str:
    return "".join(response.text for response in responses)


def tokens_of(responses: list[Response]) -> list[int]:
    return [token_id for response in responses for token_id in response.token_ids]


def details_of(error: grpc.aio.AioRpcError, kind: type[error_details_pb2.RetryInfo]) -> error_details_pb2.RetryInfo:
    raw = dict(error.trailing_metadata())[status.DETAILS]
    assert isinstance(raw, bytes)
    found = kind()
    assert any(packed.Unpack(found) for packed in status_pb2.Status.FromString(raw).details)
    return found


def saying(text: str) -> Behaviour:
    return Behaviour(script=[*text.encode(), END])


async def metric(stand: Bed, name: str) -> float:
    """A sample of the router's endpoint; labels, if it has any, belong to the name."""
    url = f"http://127.0.0.1:{stand.router.metrics_port}/metrics"

    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    lines = (await asyncio.to_thread(fetch)).splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"ostrya_router_{name} ")]
    return float(value)
