"""What operators do through a router: cordon, uncordon, drain, status. Over real sockets, with fake workers."""

import asyncio
import time

import grpc
import pytest

from ostrya.api.v1 import admin_pb2
from ostrya.client import AsyncClient
from ostrya.errors import Unavailable
from ostrya.router.settings import RouterSettings
from ostrya.state.keys import SCHEMA
from tests.fakes.waiting import until
from tests.fakes.worker import Behaviour
from tests.integration.bed import Request, bed, saying, text_of


async def test_a_cordoned_replica_gets_nothing_new_until_it_is_uncordoned() -> None:
    async with bed(saying("a"), saying("b")) as stand:
        await stand.admin.CordonReplica(admin_pb2.CordonReplicaRequest(worker_id="w0"))
        await stand.until(ready=1)
        assert {text_of(await stand.ask(Request(text=f"{n}"))) for n in range(8)} == {"b"}
        await stand.admin.CordonReplica(admin_pb2.CordonReplicaRequest(worker_id="w1"))
        await stand.until(ready=0)
        await stand.admin.UncordonReplica(admin_pb2.UncordonReplicaRequest(worker_id="w0"))
        await stand.until(ready=1)
        assert text_of(await stand.ask(Request(text="a"))) == "a"


async def test_a_drain_answers_when_the_replica_is_empty() -> None:
    async with bed(saying("to the end")) as stand:
        (worker,) = stand.workers
        worker.next_token.close()
        asking = asyncio.create_task(stand.ask(Request(text="a")))
        await worker.until(lambda one: one.active == 1)
        call = stand.admin.DrainReplica(admin_pb2.DrainReplicaRequest(worker_id="w0"), timeout=20)
        draining = asyncio.ensure_future(call)
        await stand.until(ready=0)
        assert not draining.done()
        worker.next_token.open()
        assert text_of(await asking) == "to the end"
        assert (await draining).num_cancelled == 0


async def test_what_a_drain_cuts_off_goes_on_elsewhere() -> None:
    behaviours = (saying("the whole answer"), saying("the whole answer"))
    async with bed(*behaviours, settings=RouterSettings(no_replica_wait_s=20.0)) as stand:
        for worker in stand.workers:
            worker.next_token.close()
            worker.next_token.allow(3)
        asking = asyncio.create_task(stand.ask(Request(text="a")))
        await until(lambda: any(one.active for one in stand.workers))
        busy, other = sorted(stand.workers, key=lambda one: one.active, reverse=True)
        other.behaviour.script = other.behaviour.script[4:] if other.behaviour.script else None
        other.next_token.open()
        asked = admin_pb2.DrainReplicaRequest(worker_id=busy.identity.worker_id, timeout_s=0.2)
        assert (await stand.admin.DrainReplica(asked)).num_cancelled == 1
        assert text_of(await asking) == "the whole answer"


@pytest.mark.parametrize("what", ["CordonReplica", "UncordonReplica", "DrainReplica"])
async def test_an_unknown_replica_is_not_found_and_one_that_is_gone_is_unavailable(what: str) -> None:
    asked = {
        name: getattr(admin_pb2, f"{name}Request") for name in ("CordonReplica", "UncordonReplica", "DrainReplica")
    }
    async with bed(Behaviour()) as stand:
        with pytest.raises(grpc.aio.AioRpcError, match="replicas: w0") as unknown:
            await getattr(stand.admin, what)(asked[what](worker_id="w9"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        await stand.workers[0].stop()
        with pytest.raises(grpc.aio.AioRpcError, match="replica w0 did not answer: Connection refused") as gone:
            await getattr(stand.admin, what)(asked[what](worker_id="w0"), timeout=10)
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE
        async with AsyncClient(f"127.0.0.1:{stand.router.port}") as client:
            with pytest.raises(Unavailable, match=r"^replica w0 did not answer: Connection refused$"):
                await client.cordon("w0")


async def test_the_status_says_what_the_router_is_and_is_busy_with() -> None:
    async with bed(Behaviour(), settings=RouterSettings(no_replica_wait_s=20.0)) as stand:
        (worker,) = stand.workers
        worker.first_token.close()
        first = asyncio.create_task(stand.ask(Request(text="a")))
        await worker.until(lambda one: one.active == 1)
        await worker.set_serving(False)
        await stand.until(ready=0)
        second = asyncio.create_task(stand.ask(Request(text="b")))
        await until(lambda: stand.num_waiting == 1)
        status = await stand.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.pool, status.model, status.discovery) == ("default", "tiny", "registry")
        assert (status.num_in_flight, status.num_waiting, status.is_draining) == (2, 1, False)
        assert (status.redis_connected, status.state_schema) == (False, SCHEMA)
        assert not status.HasField("kubernetes_connected")
        assert status.version
        assert abs(status.time_s - time.time()) < 10
        for asking in (first, second):
            asking.cancel()
        await stand.idle()
