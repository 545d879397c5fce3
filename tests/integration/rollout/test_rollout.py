"""A full update of workers and routers at once, under 50 streams a second: none fails, none is cut short.

Real model in float32, so every stream must have exactly the tokens of an undisturbed run, whoever computed them.
"""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostrya.client import AsyncClient
from ostrya.errors import OstryaError
from tests.fakes.kube_api import KubeApi
from tests.fakes.redis_server import RunningRedis, start_redis
from tests.integration.rollout import cluster as clusters
from tests.integration.rollout.cluster import SLICED, Cluster, Pod, PodSpec
from tests.integration.rollout.service import Service

NUM_ROUTERS = 2
NUM_CONNECTIONS = 10
# A machine that cannot carry the rate gets less of it, instead of a queue that outgrows every limit.
MAX_OPEN = 100
TIMEOUT_S = 180.0
# Two cores must carry this rate while processes start: most answers are short, some live for many seconds.
SHORT_TOKENS, LONG_TOKENS, LONG_EVERY = 2, 40, 40
PROMPTS = [f"The {thing} is" for thing in ("tide", "bread", "lighthouse", "frost", "hornbeam", "tea", "glass", "moon")]
# Above the longest stream of a machine that is busy with something else; what counts is that nobody uses it up.
DRAIN_S = 150
WORKER_READINESS = "ostrya.api.v1.WorkerService"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is deployed, and how many streams it meets."""

    num_workers: int
    num_streams: int
    rate_per_s: float
    watches_slices: bool = False
    """Whether every second router finds its workers by EndpointSlices; the others find them by the registry."""


@dataclass(slots=True)
class Outcomes:
    """What became of the streams."""

    num_started: int = 0
    arrivals_s: float = 0.0
    """From the first stream's start to the last one's."""
    wrong: list[str] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)


def worker_spec(redis: RunningRedis) -> PodSpec:
    def command(name: str, *ports: int) -> tuple[str, ...]:
        options = ("--dtype", "float32", "--num-threads", "1", "--num-pages", "2048", "--max-waiting", "1024")
        return ("worker", "--worker-id", name, *_common(redis, *ports), *options)

    return PodSpec(command, readiness=WORKER_READINESS)


def router_spec(redis: RunningRedis, slices: KubeApi | None) -> PodSpec:
    watch = ("--discovery", "kubernetes", "--kubernetes-service", SLICED, "--kubernetes-namespace", "default")
    options = (*watch, "--kubernetes-api", slices.url) if slices is not None else ()

    def command(name: str, *ports: int) -> tuple[str, ...]:
        return ("router", *_common(redis, *ports), *(options if name.endswith("1") else ()))

    return PodSpec(command, readiness="")


def _common(redis: RunningRedis, port: int, metrics_port: int) -> tuple[str, ...]:
    ports = ("--port", str(port), "--metrics-port", str(metrics_port))
    return (*ports, "--redis-url", redis.url, "--drain-timeout-s", str(DRAIN_S))


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(num_workers=2, num_streams=1000, rate_per_s=50, watches_slices=True), id="two workers"),
        # While its only worker is replaced a pool has none: requests wait in the routers.
        pytest.param(Scenario(num_workers=1, num_streams=150, rate_per_s=10), id="one worker"),
    ],
)
async def test_no_stream_fails_or_is_cut_short_while_everything_is_replaced(tmp_path: Path, scenario: Scenario) -> None:
    redis, outcomes = start_redis(), Outcomes()
    try:
        async with deployed(tmp_path, redis, scenario) as (cluster, service):
            expected = await answers(service.target)
            rollout = asyncio.create_task(update_everything(cluster, redis))
            await stream_until(rollout, service.target, expected, outcomes, scenario)
            await rollout
            late_shapes = [await asyncio.to_thread(num_late_shapes, pod) for pod in cluster.pods[SLICED]]
    finally:
        redis.stop()
    report(outcomes, cluster)
    assert outcomes.wrong == []
    assert outcomes.num_started >= scenario.num_streams
    assert [pod.exit_code for pod in cluster.gone] == [0] * (scenario.num_workers + NUM_ROUTERS)
    # From SIGTERM to empty: at most the longest stream, and a process' own end.
    assert max(pod.drained_s for pod in cluster.gone) <= max(outcomes.durations_s) + 5
    assert late_shapes == [0] * scenario.num_workers


@asynccontextmanager
async def deployed(logs: Path, redis: RunningRedis, scenario: Scenario) -> AsyncIterator[tuple[Cluster, Service]]:
    """Routers behind a Service, and workers, all ready."""
    async with AsyncExitStack() as stack:
        slices = stack.enter_context(KubeApi()) if scenario.watches_slices else None
        cluster = await stack.enter_async_context(clusters.running(logs, slices))
        await asyncio.gather(
            cluster.create(SLICED, worker_spec(redis), [f"worker-{n}" for n in range(scenario.num_workers)]),
            cluster.create("routers", router_spec(redis, cluster.slices), [f"router-{n}" for n in range(NUM_ROUTERS)]),
        )
        yield cluster, await stack.enter_async_context(Service(lambda: cluster.endpoints("routers")))


async def update_everything(cluster: Cluster, redis: RunningRedis) -> None:
    """What `helm upgrade` does when both templates changed."""
    await asyncio.gather(
        cluster.update_stateful_set(SLICED, worker_spec(redis)),
        cluster.update_deployment("routers", router_spec(redis, cluster.slices)),
    )


async def answers(target: str) -> dict[str, list[int]]:
    """The tokens of every prompt, undisturbed."""
    async with AsyncClient(target) as client:
        found = await asyncio.gather(*(tokens(client, prompt, LONG_TOKENS) for prompt in PROMPTS))
    return dict(zip(PROMPTS, found, strict=True))


async def tokens(client: AsyncClient, prompt: str, max_tokens: int) -> list[int]:
    stream = client.generate(text=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S)
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


async def stream_until(
    rollout: "asyncio.Task[None]", target: str, expected: dict[str, list[int]], outcomes: Outcomes, scenario: Scenario
) -> None:
    """Starts streams at a steady rate until the rollout is over and enough have been; awaits all."""
    room = asyncio.Semaphore(MAX_OPEN)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as streams:
        clients = [await stack.enter_async_context(AsyncClient(target)) for _ in range(NUM_CONNECTIONS)]
        due = began = time.monotonic()
        while outcomes.num_started < scenario.num_streams or not rollout.done():
            number = outcomes.num_started
            outcomes.num_started += 1
            await room.acquire()
            task = streams.create_task(one(clients[number % NUM_CONNECTIONS], number, expected, outcomes))
            task.add_done_callback(lambda _: room.release())
            due = max(due + 1 / scenario.rate_per_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
        outcomes.arrivals_s = time.monotonic() - began


async def one(client: AsyncClient, number: int, expected: dict[str, list[int]], outcomes: Outcomes) -> None:
    """One stream, compared with what it must be."""
    prompt = PROMPTS[number % len(PROMPTS)]
    max_tokens = SHORT_TOKENS if number % LONG_EVERY else LONG_TOKENS
    began = time.monotonic()
    try:
        found = await tokens(client, prompt, max_tokens)
    except OstryaError as error:
        outcomes.wrong.append(f"stream {number}: {type(error).__name__}: {error}")
        return
    outcomes.durations_s.append(time.monotonic() - began)
    if found != expected[prompt][:max_tokens]:
        outcomes.wrong.append(f"stream {number}: {len(found)} of {max_tokens} tokens, or other ones")


def num_late_shapes(worker: Pod) -> float:
    """Compiles after Ready."""
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    (found,) = [sample.value for sample in samples if sample.name == "ostrya_worker_late_shapes_total"]
    return found


def report(outcomes: Outcomes, cluster: Cluster) -> None:
    durations = sorted(outcomes.durations_s)
    drained = ", ".join(f"{pod.name} {pod.drained_s:.1f} s" for pod in cluster.gone)
    print(
        f"{outcomes.num_started} streams, {outcomes.num_started / outcomes.arrivals_s:.0f} a second, "
        f"{len(outcomes.wrong)} wrong; "
        f"p50 {durations[len(durations) // 2]:.2f} s, longest {durations[-1]:.2f} s; drained: {drained}"
    )
