"""A router that finds its workers through a Kubernetes API: real sockets and Redis, fake workers and API server."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from ostrya.api.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from ostrya.router.app import Router
from ostrya.router.disruption import ACTIVE_LABEL, SCHEDULED_LABEL, TERMINATION_TAINT
from ostrya.router.settings import RouterSettings
from ostrya.router.types import Hold, ReplicaState, WorkerId
from ostrya.service.server import channel
from ostrya.state import keys
from ostrya.state.connection import Connection
from ostrya.worker.publisher import Publisher
from tests.fakes.kube_api import NODES, KubeApi, endpoint
from tests.fakes.pool import publishing
from tests.fakes.redis_server import RunningRedis, start_redis
from tests.fakes.tokenizer import byte_tokenizer
from tests.fakes.waiting import until
from tests.fakes.worker import FakeWorker, Identity

TOKENIZER = byte_tokenizer()
LONG, SHORT = 64, 4


@dataclass(slots=True)
class Pool:
    """A router, its API server, its Redis and workers w0, w1, … each in a slice and on a node of the same number."""

    api: KubeApi
    redis: RunningRedis
    router: Router
    workers: list[FakeWorker]
    publishers: list[Publisher]
    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"

    def endpoint(self, number: int, **conditions: bool) -> None:
        """What Kubernetes says of a worker from now on."""
        host, _, port = self.workers[number].address.rpartition(":")
        self.api.put_slice(f"w{number}", [endpoint(host, f"n{number}", **conditions)], port=int(port))

    def routable(self) -> set[str]:
        return {view.worker_id for view in self.router.fleet.snapshot().replicas}

    def holds(self) -> dict[str, tuple[Hold, ...]]:
        return {row.info.worker_id: row.holds for row in self.router.fleet.replicas() if row.holds}

    async def ask(self, *, max_tokens: int = SHORT) -> str:
        """One request to its end; who answered it."""
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
        request = inference_pb2.GenerateRequest(text="What?", sampling=sampling)
        answers = [answer async for answer in self.inference.Generate(request, timeout=10.0)]
        assert answers[-1].finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
        return answers[-1].replica

    async def answered_by(self, count: int = 12, *, max_tokens: int = SHORT) -> set[str]:
        """Everybody who answers one of `count` requests at the same time."""
        return set(await asyncio.gather(*(self.ask(max_tokens=max_tokens) for _ in range(count))))


@asynccontextmanager
async def pool(num_workers: int = 2, *, maintenance: bool = False) -> AsyncIterator[Pool]:
    """All workers registered, ready and routable."""
    async with AsyncExitStack() as stack:
        api = stack.enter_context(KubeApi())
        redis = start_redis()
        stack.callback(redis.stop)
        workers, publishers = [], []
        for number in range(num_workers):
            identity = Identity(worker_id=f"w{number}", tokenizer_fingerprint=TOKENIZER.fingerprint)
            worker = await stack.enter_async_context(FakeWorker(identity))
            publisher = publishing(redis.url, f"w{number}", address=worker.address)
            publishers.append(await stack.enter_async_context(publisher))
            workers.append(worker)
        router = Router(settings(api, redis, maintenance=maintenance), name="tiny", tokenizer=TOKENIZER)
        await stack.enter_async_context(router.serving())
        open_channel = await stack.enter_async_context(channel(f"127.0.0.1:{router.port}", max_message_bytes=1 << 20))
        inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(open_channel)
        made = Pool(api, redis, router, workers, publishers, inference)
        for number in range(num_workers):
            made.endpoint(number, ready=True)
        await until(lambda: len(made.routable()) == num_workers)
        await until(lambda: router.fleet.redis_up)
        yield made


def settings(api: KubeApi, redis: RunningRedis, *, maintenance: bool = False) -> RouterSettings:
    return RouterSettings(
        port=0,
        redis_url=redis.url,
        discovery="kubernetes",
        kubernetes_service="workers",
        kubernetes_namespace="default",
        kubernetes_api=api.url,
        maintenance=maintenance,
        long_request_tokens=LONG,
        no_replica_wait_s=0.2,
        drain_timeout_s=1.0,
    )


async def streaming(pool: Pool, number: int) -> "asyncio.Task[str]":
    """A request that runs on that worker and stays there until its gate opens."""
    pool.workers[number].next_token.close()
    others = [worker for worker in pool.workers if worker is not pool.workers[number]]
    for other in others:
        await other.set_serving(False)
    await until(lambda: pool.routable() == {f"w{number}"})
    task = asyncio.create_task(pool.ask())
    await pool.workers[number].until(lambda worker: worker.active == 1)
    for other in others:
        await other.set_serving(True)
    await until(lambda: len(pool.routable()) == len(pool.workers))
    return task


async def test_the_endpoints_of_the_service_serve_and_their_registration_gives_epochs() -> None:
    async with pool() as made:
        assert await made.answered_by() == {"w0", "w1"}
        epochs = {f"w{number}": publisher.epoch for number, publisher in enumerate(made.publishers)}
        await until(lambda: {row.info.worker_id: row.info.epoch for row in made.router.fleet.replicas()} == epochs)


async def test_a_terminating_replica_gets_no_new_work_and_finishes_what_it_has() -> None:
    async with pool() as made:
        running = await streaming(made, 0)
        made.endpoint(0, ready=False, serving=True, terminating=True)
        assert await until(lambda: made.routable() == {"w1"}) < 1.0
        assert made.holds() == {"w0": (Hold.TERMINATING,)}
        assert await made.answered_by() == {"w1"}
        assert not running.done()
        made.workers[0].next_token.open()
        assert await running == "w0"
        assert len(made.workers[0].record.requests) == 1


async def test_a_replica_without_an_endpoint_goes_when_its_streams_have_ended() -> None:
    async with pool() as made:
        running = await streaming(made, 0)
        made.api.delete_slice("w0")
        await until(lambda: made.holds() == {"w0": (Hold.TERMINATING,)})
        assert await made.answered_by() == {"w1"}
        assert made.router.fleet.state(WorkerId("w0")) is ReplicaState.READY
        made.workers[0].next_token.open()
        assert await running == "w0"
        await until(lambda: made.router.fleet.state(WorkerId("w0")) is None)


async def test_a_replica_without_an_endpoint_goes_when_its_connection_breaks() -> None:
    async with pool() as made:
        running = await streaming(made, 0)
        made.api.delete_slice("w0")
        await until(lambda: made.routable() == {"w1"})
        await made.workers[0].stop()
        assert await running == "w1", "continued elsewhere"
        await until(lambda: made.router.fleet.state(WorkerId("w0")) is None)


async def test_a_deletion_nobody_told_of_is_seen_within_ten_seconds() -> None:
    async with pool() as made:
        made.api.swallow_next()
        made.api.delete_slice("w0")
        assert await until(lambda: made.router.fleet.state(WorkerId("w0")) is None, timeout_s=10.0) < 10.0
        assert await made.answered_by() == {"w1"}


async def test_not_ready_is_unroutable_though_it_serves_and_ready_again_is_routable() -> None:
    async with pool() as made:
        made.endpoint(0, ready=False, serving=False)
        await until(lambda: made.routable() == {"w1"})
        assert made.holds() == {"w0": (Hold.NOT_READY,)}
        assert made.router.fleet.state(WorkerId("w0")) is ReplicaState.READY
        made.endpoint(0, ready=True)
        await until(lambda: made.routable() == {"w0", "w1"})
        assert made.holds() == {}


async def test_ready_is_unroutable_while_its_health_says_otherwise() -> None:
    async with pool() as made:
        await made.workers[0].set_serving(False)
        await until(lambda: made.routable() == {"w1"})
        assert made.holds() == {}


async def test_a_lease_that_is_over_holds_a_replica_though_it_is_ready_until_it_registers_again() -> None:
    async with AsyncExitStack() as stack, pool(1) as made:
        identity = Identity(worker_id="late", tokenizer_fingerprint=TOKENIZER.fingerprint)
        made.workers.append(await stack.enter_async_context(FakeWorker(identity)))
        async with publishing(made.redis.url, "late", address=made.workers[1].address):
            made.endpoint(1, ready=True)
            await until(lambda: made.routable() == {"w0", "late"})
        made.workers[1].answer.close()  # who answers without a lease stays
        assert await until(lambda: made.routable() == {"w0"}, timeout_s=6.0) <= 5.0
        assert made.holds() == {"late": (Hold.NO_LEASE,)}
        assert await made.answered_by() == {"w0"}
        made.workers[1].answer.open()
        async with publishing(made.redis.url, "late", address=made.workers[1].address):
            await until(lambda: made.routable() == {"w0", "late"})


async def test_with_redis_or_the_api_gone_nobody_loses_its_place_and_no_request_fails() -> None:
    async with pool() as made:
        made.redis.kill()
        await until(lambda: not made.router.fleet.redis_up)
        await asyncio.to_thread(made.api.stop)
        await until(lambda: made.router._discovery.kubernetes_up is False)
        assert await made.answered_by() == {"w0", "w1"}
        made.redis.restart()
        made.api.start()
        back = time.monotonic()

        def is_whole() -> bool:
            assert made.routable() == {"w0", "w1"}
            return made.router.fleet.redis_up and bool(made.router._discovery.kubernetes_up)

        await until(is_whole)
        # Longer than a lease: the emptied Redis is filled again in time.
        await until(lambda: is_whole() and time.monotonic() - back > keys.LEASE_MS / 1000 + 1.0, timeout_s=6.0)


async def test_a_router_that_starts_while_the_api_is_away_takes_the_members_until_it_hears_better() -> None:
    async with pool() as made:
        await asyncio.to_thread(made.api.stop)
        second = Router(settings(made.api, made.redis), name="tiny", tokenizer=TOKENIZER)
        async with second.serving():
            await until(lambda: len(second.fleet.snapshot().replicas) == 2)
            made.api.delete_slice("w1")
            made.api.start()
            await until(lambda: [view.worker_id for view in second.fleet.snapshot().replicas] == ["w0"])
            await until(lambda: second.fleet.state(WorkerId("w1")) is None)


async def test_a_pod_that_comes_back_under_its_name_elsewhere_replaces_the_old() -> None:
    async with AsyncExitStack() as stack, pool(1) as made:
        await made.workers[0].stop()
        made.api.delete_slice("w0")
        identity = Identity(worker_id="w0", tokenizer_fingerprint=TOKENIZER.fingerprint)
        worker = await stack.enter_async_context(FakeWorker(identity))
        publisher = await stack.enter_async_context(publishing(made.redis.url, "w0", address=worker.address))
        await until(lambda: publisher.epoch > made.publishers[0].epoch)
        identity.epoch = publisher.epoch
        made.workers[0] = worker
        made.endpoint(0, ready=True)
        await until(
            lambda: made.routable() == {"w0"} and made.router.fleet.replicas()[0].info.address == worker.address
        )
        assert await made.ask() == "w0"


async def test_a_router_that_may_not_read_nodes_says_so_in_its_metrics() -> None:
    async with pool(maintenance=True) as made:

        def metrics() -> list[str]:
            url = f"http://127.0.0.1:{made.router.metrics_port}/metrics"
            with urllib.request.urlopen(url, timeout=5.0) as answer:
                text: str = answer.read().decode()
            return text.splitlines()

        up = 'ostrya_router_kubernetes_up{resource="nodes"}'
        await until(lambda: f"{up} 1.0" in metrics())
        made.api.refuse("list", 403, path=NODES)
        made.api.refuse("watch", 403, path=NODES)
        await until(lambda: f"{up} 0.0" in metrics())
        assert 'ostrya_router_kubernetes_up{resource="endpointslices"} 1.0' in metrics()
        assert await made.answered_by() == {"w0", "w1"}


async def test_maintenance_soon_steers_long_requests_away_and_short_ones_not() -> None:
    async with pool(maintenance=True) as made:
        made.api.put_node("n0", labels={SCHEDULED_LABEL: str(int(time.time()) + 300)})
        await until(lambda: made.holds() == {"w0": (Hold.MAINTENANCE,)})
        assert made.routable() == {"w0", "w1"}
        assert await made.answered_by(max_tokens=LONG) == {"w1"}
        assert await made.answered_by(max_tokens=LONG - 1) == {"w0", "w1"}
        made.endpoint(1, ready=False)
        await until(lambda: made.routable() == {"w0"})
        assert await made.ask(max_tokens=LONG) == "w0", "nobody else is there"
        made.api.put_node("n0")
        made.endpoint(1, ready=True)
        await until(lambda: made.holds() == {})


async def test_a_node_that_ends_gets_nothing_new_while_somebody_else_is_there() -> None:
    async with pool(3, maintenance=True) as made:
        made.api.put_node("n0", taints=[TERMINATION_TAINT])
        made.api.put_node("n1", labels={ACTIVE_LABEL: "ONGOING"})
        held = (Hold.TERMINATION_IMPENDING,)
        await until(lambda: made.holds() == {"w0": held, "w1": held})
        assert await made.answered_by() == {"w2"}
        made.api.put_node("n2", labels={SCHEDULED_LABEL: str(int(time.time()) + 300)})
        await until(lambda: len(made.holds()) == 3)
        assert await made.answered_by(max_tokens=LONG) == {"w2"}, "soon is better than now"
        made.api.delete_slice("w2")
        await until(lambda: made.routable() == {"w0", "w1"})
        assert await made.answered_by() == {"w0", "w1"}


async def test_a_maintenance_far_away_is_no_reason_yet() -> None:
    async with pool(maintenance=True) as made:
        made.api.put_node("n0", labels={SCHEDULED_LABEL: str(int(time.time()) + 3600)})
        await until(lambda: bool(made.router._discovery._cluster and made.router._discovery._cluster._outlooks))
        assert await made.answered_by(max_tokens=LONG) == {"w0", "w1"}
        assert made.holds() == {}


async def test_in_static_mode_the_members_decide_nothing_but_are_followed() -> None:
    async with AsyncExitStack() as stack:
        redis = start_redis()
        stack.callback(redis.stop)
        workers = {}
        for name in ("named", "member"):
            identity = Identity(worker_id=name, tokenizer_fingerprint=TOKENIZER.fingerprint)
            workers[name] = await stack.enter_async_context(FakeWorker(identity))
        await stack.enter_async_context(publishing(redis.url, "member", address=workers["member"].address))
        static = RouterSettings(
            port=0, redis_url=redis.url, discovery="static", static_workers=(workers["named"].address,)
        )
        router = Router(static, name="tiny", tokenizer=TOKENIZER)
        await stack.enter_async_context(router.serving())

        def names() -> list[str]:
            return [row.info.worker_id for row in router.fleet.replicas() if row.is_routable]

        async with publishing(redis.url, "named", address=workers["named"].address) as publisher:
            await until(lambda: bool(names()) and router.fleet.replicas()[0].info.epoch == publisher.epoch)
            assert names() == ["named"]
        # Its lease ends, and that decides nothing.
        connection = Connection(redis.url)
        stack.push_async_callback(connection.close)
        await connection.call("DEL", keys.worker_keys("default", "named").lease)
        workers["named"].answer.close()
        await until(lambda: WorkerId("named") in router._discovery._registry.over, timeout_s=6.0)
        assert names() == ["named"]
        assert router._discovery.kubernetes_up is None
