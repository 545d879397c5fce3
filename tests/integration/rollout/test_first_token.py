"""The chart's defaults, run as the processes they ask for: the first token needs no step but the pull and the start.

Arguments and environment are the rendered ones; only addresses are this machine's, because there is no cluster here.
"""

import asyncio
import time
from pathlib import Path

from ostrya.client import AsyncClient
from tests.chart.commands import command_of
from tests.chart.pods import Pod, pods
from tests.chart.render import Render, render
from tests.fakes.redis_server import RunningRedis, start_redis
from tests.integration.rollout import cluster as clusters
from tests.integration.rollout.cluster import PodSpec

FROM_READY_S = 30.0
MODEL_POOL = "default"


def as_process(rendered: Render, pod: Pod, redis: RunningRedis) -> PodSpec:
    """The pod's own command line, with what this machine has instead of pod addresses and a Secret."""
    command = command_of(rendered, pod, pod.main)

    def line(name: str, port: int, metrics_port: int) -> tuple[str, ...]:
        # Of an option given twice the last one counts.
        ports = ("--host", "127.0.0.1", "--port", str(port), "--metrics-port", str(metrics_port))
        own = ("--worker-id", name, "--advertise-address", f"127.0.0.1:{port}") if command.args[0] == "worker" else ()
        return (*command.args, *ports, *own, "--redis-url", redis.url)

    readiness = pod.main.probes["readiness"].grpc
    assert readiness is not None
    return PodSpec(line, readiness=readiness.service, environment=dict(command.env))


async def test_the_defaults_serve_a_first_token_as_soon_as_they_are_ready(tmp_path: Path) -> None:
    rendered, redis = render({}), start_redis()
    (router,), (worker,) = pods(rendered, "router"), pods(rendered, "worker")
    assert (router.pool, worker.pool) == (MODEL_POOL, MODEL_POOL)
    try:
        async with clusters.running(tmp_path) as cluster:
            began = time.monotonic()
            await asyncio.gather(
                cluster.create("routers", as_process(rendered, router, redis), ["router-0"]),
                cluster.create("workers", as_process(rendered, worker, redis), ["worker-0", "worker-1"]),
            )
            ready = time.monotonic()
            async with (
                AsyncClient(cluster.pods["routers"][0].address) as client,
                client.generate(text="The ironwood tree is", max_tokens=4, timeout_s=60) as stream,
            ):
                text = (await anext(stream)).text
                first_token = time.monotonic()
    finally:
        redis.stop()
    print(f"ready after {ready - began:.1f} s, first token {first_token - ready:.2f} s later")
    assert text
    assert first_token - ready <= FROM_READY_S
