"""A worker that hangs keeps its connections: only pings that stay unanswered tell."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.client.attempts import CHANNEL_OPTIONS
from ostrya.router.settings import RouterSettings
from tests.fakes.waiting import Stopwatch, until
from tests.integration.bed import router_of

NOTICED_S = 16.0
"""A ping after at most 10 s, 5 s for its answer; at gRPC's defaults it takes a minute longer."""


@asynccontextmanager
async def worker_process() -> AsyncIterator[tuple[Process, str]]:
    """The process and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.worker_server", "w0", stdin=PIPE, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            yield process, (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def test_a_worker_that_hangs_is_noticed_by_routers_and_clients_within_15_seconds() -> None:
    async with worker_process() as (process, address):
        router = router_of((address,), RouterSettings(port=0, discovery="static"))
        async with router.serving(), grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as client:
            await until(lambda: router.fleet.snapshot().replicas, timeout_s=10)
            watch = health_pb2_grpc.HealthStub(client).Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
            await watch.read()
            os.kill(process.pid, signal.SIGSTOP)

            async def client_notices() -> None:
                silent = Stopwatch()
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await asyncio.wait_for(watch.read(), 4 * NOTICED_S)
                assert silent.seconds() < NOTICED_S

            await asyncio.gather(
                until(lambda: not router.fleet.snapshot().replicas, timeout_s=NOTICED_S), client_notices()
            )
