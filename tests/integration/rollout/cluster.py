"""What a cluster does to processes in an update: a kubelet that probes and terminates, two controllers that replace.

A pod is a process of ours, started through the `ostrya` command. Each new one has a new address, as in a cluster.
"""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.kube_api import KubeApi, endpoint
from tests.fakes.redis_server import free_port

PROBE_PERIOD_S = 0.5
PRE_STOP_S = 1.0
"""The chart's preStop sleep, shortened like the other periods: longer than the Service needs to look away."""
GRACE_S = 170.0
"""terminationGracePeriodSeconds, counted from the SIGTERM. Whoever needs a SIGKILL has failed."""
READY_TIMEOUT_S = 180.0
SLICED = "workers"
"""The controller whose pods' endpoints routers may watch; also its Service."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """What a controller needs to make one: its command, and the health service that its readiness probe asks."""

    command: Callable[[str, int, int], tuple[str, ...]]
    """(pod name, its gRPC port, its metrics port) -> arguments of `ostrya`."""
    readiness: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Pod:
    """One process and what the cluster knows of it."""

    name: str
    port: int
    metrics_port: int
    process: Process
    created_s: float
    ready: bool = False
    ready_s: float = 0.0
    terminating: bool = False
    drained_s: float = 0.0
    """From SIGTERM to its end."""
    exit_code: int | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass(slots=True)
class Cluster:
    """Pods by controller, and the kubelet that looks after them. Make it with `running`."""

    logs: Path
    pods: dict[str, list[Pod]] = field(default_factory=dict)
    gone: list[Pod] = field(default_factory=list)
    """Pods that have ended, in their order."""
    slices: KubeApi | None = None
    """Where the endpoints of `SLICED` are kept up to date, as the endpoint slice controller does."""
    _probing: dict[Pod, asyncio.Task[None]] = field(default_factory=dict)

    def endpoints(self, controller: str) -> list[str]:
        """Addresses that are ready and not terminating."""
        return [pod.address for pod in self.pods.get(controller, []) if pod.ready and not pod.terminating]

    async def create(self, controller: str, spec: PodSpec, names: Sequence[str]) -> None:
        """Pods of a controller, all at once; returns when all are ready."""
        pods = [await self._start(controller, spec, name) for name in names]
        await asyncio.gather(*(self._until_ready(pod) for pod in pods))

    async def update_stateful_set(self, controller: str, spec: PodSpec) -> None:
        """Highest ordinal first: the old one ends, then the new one of the same name must be ready."""
        for old in sorted(self.pods[controller], key=lambda pod: pod.name, reverse=True):
            await self.delete(controller, old)
            await self._until_ready(await self._start(controller, spec, old.name))

    async def update_deployment(self, controller: str, spec: PodSpec) -> None:
        """maxSurge 1, maxUnavailable 0: a new one is ready before an old one has to go."""
        ending: list[asyncio.Task[None]] = []
        for number, old in enumerate(list(self.pods[controller])):
            await self._until_ready(await self._start(controller, spec, f"{controller}-new-{number}"))
            ending.append(asyncio.create_task(self.delete(controller, old)))
        await asyncio.gather(*ending)

    async def delete(self, controller: str, pod: Pod) -> None:
        """Terminating, preStop, SIGTERM, grace, SIGKILL."""
        pod.terminating = True
        self._reconcile()
        await asyncio.sleep(PRE_STOP_S)  # the hook is a sleep
        began = time.monotonic()
        pod.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE_S):
                pod.exit_code = await pod.process.wait()
        except TimeoutError:
            pod.process.kill()
            pod.exit_code = await pod.process.wait()
        pod.drained_s = time.monotonic() - began
        self._probing.pop(pod).cancel()
        self.pods[controller].remove(pod)
        self.gone.append(pod)
        self._reconcile()

    async def close(self) -> None:
        """Ends every process, quickly."""
        for task in self._probing.values():
            task.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)
        for pod in [pod for pods in self.pods.values() for pod in pods]:
            with suppress(ProcessLookupError):
                pod.process.kill()
            await pod.process.wait()

    def _reconcile(self) -> None:
        """One slice for each pod, since each has a port of its own here. A pod that ended has none."""
        if self.slices is None:
            return
        for pod in self.pods.get(SLICED, []):
            conditions = {"ready": pod.ready and not pod.terminating, "serving": pod.ready}
            row = endpoint(terminating=pod.terminating, **conditions)
            self.slices.put_slice(f"{SLICED}-{pod.port}", [row], port=pod.port)
        for pod in self.gone:
            self.slices.delete_slice(f"{SLICED}-{pod.port}")

    async def _start(self, controller: str, spec: PodSpec, name: str) -> Pod:
        port, metrics_port = free_port(), free_port()
        arguments = (sys.executable, "-m", "ostrya.cli.main", *spec.command(name, port, metrics_port))
        with (self.logs / f"{name}-{port}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *arguments, stdin=DEVNULL, stdout=log, stderr=log, env={**os.environ, **spec.environment}
            )
        pod = Pod(name, port, metrics_port, process, time.monotonic())
        self.pods.setdefault(controller, []).append(pod)
        self._probing[pod] = asyncio.create_task(self._probe(pod, spec.readiness))
        self._reconcile()
        return pod

    async def _probe(self, pod: Pod, service: str) -> None:
        """The readiness probe, as long as the pod is there."""
        async with grpc.aio.insecure_channel(pod.address, options=[("grpc.max_reconnect_backoff_ms", 200)]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    question = health_pb2.HealthCheckRequest(service=service)
                    answer = await health.Check(question, timeout=1)  # type: ignore[attr-defined]
                    ready = answer.status == health_pb2.HealthCheckResponse.SERVING
                except grpc.aio.AioRpcError:
                    ready = False
                if ready is not pod.ready:
                    pod.ready, pod.ready_s = ready, time.monotonic() - pod.created_s
                    self._reconcile()
                await asyncio.sleep(PROBE_PERIOD_S)  # a probe has a period

    async def _until_ready(self, pod: Pod) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not pod.ready:
            if pod.process.returncode is not None or time.monotonic() > deadline:
                tail = (self.logs / f"{pod.name}-{pod.port}.log").read_text()[-2000:]
                raise AssertionError(f"{pod.name} is not ready (exit code {pod.process.returncode}): {tail}")
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running(logs: Path, slices: KubeApi | None = None) -> AsyncIterator[Cluster]:
    """A cluster without pods; none is left at the end."""
    cluster = Cluster(logs, slices=slices)
    try:
        yield cluster
    finally:
        await cluster.close()
