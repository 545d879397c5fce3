"""The processes behind `ostrya up`: Redis, a router, N workers. Starts them together, watches them, stops them all."""

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ostrya.cli import local_redis
from ostrya.cli.children import MARK, Child, marked
from ostrya.cli.ports import HOST, free_ports
from ostrya.cli.simulated import SimulatedModel
from ostrya.errors import OstryaError

POLL_S = 0.1
PROBE_TIMEOUT_S = 1.0
STOP_GRACE_S = 5.0
MAX_RESTARTS = 5
"""Of one child, over the life of the stack: what keeps dying is broken, and saying so beats hiding it."""
NUM_PAGES = 2048
"""Of each worker: 32k tokens, 0.7 GiB for SmolLM2 in bfloat16; a stack on a laptop is not alone there."""
PAGE_SIZE, ROUTING_STRIDE = 16, 2
"""What workers take unless told otherwise."""
TPU_PAGE_SIZE, TPU_MAX_RUNNING, TPU_STEP_TOKENS = 64, 64, 2048
"""Of simulated workers: a routing block of 128 tokens, a batch as serving engines have it on TPU, and chunks as
`ostrya capacity` cuts prompts."""
REDIS = "redis"
ROUTER = "router"


class StackFailed(OstryaError):
    """A child ended before it served, or keeps ending; the message has its last log lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What `ostrya up` takes."""

    num_workers: int
    model: str
    port: int
    dtype: str
    weights: str = "auto"
    simulated: SimulatedModel | None = None
    """Not None: workers have backend roofline, and `model` is not computed."""
    slice: str = ""
    """Of TPUs, on which it is simulated."""
    backend: str = "cpu"
    """Of what is not simulated."""
    tensor_parallel: int = 1
    worker_options: tuple[str, ...] = ()
    """For every worker, after its other ones."""
    max_start_s: float = 180.0

    @property
    def start_limit_s(self) -> float:
        """Twenty programs of some seconds each, where workers share the processors."""
        return self.max_start_s if self.backend != "xla" else max(self.max_start_s, 600.0 * self.num_workers)


class Stack:
    """Use `running` to make one."""

    def __init__(self, options: StackOptions, directory: Path, say: Callable[[str], None]) -> None:
        self.options, self.directory = options, directory
        self.stack_id = uuid.uuid4().hex
        self.began = time.monotonic()
        self.workers = [f"worker-{number}" for number in range(options.num_workers)]
        self.ports = self._choose_ports()
        self.serving_s: dict[str, float] = {}
        """Seconds from the start until each child served."""
        self.strays: list[int] = []
        """What had to be killed at the end because it had outlived the child that started it."""
        self._say = say
        self._commands = self._all_commands()
        self._children: dict[str, Child] = {}
        self._may_run = {name: asyncio.Event() for name in self._commands}
        self._stopping = False

    @property
    def target(self) -> str:
        """Where clients go."""
        return f"{HOST}:{self.ports[ROUTER]}"

    @property
    def has_redis(self) -> bool:
        """False where this machine has none."""
        return REDIS in self.ports

    @property
    def tokens_per_block(self) -> int:
        """Of what routers know; unless a worker option says otherwise."""
        return ROUTING_STRIDE * (TPU_PAGE_SIZE if self.options.simulated else PAGE_SIZE)

    @property
    def names(self) -> list[str]:
        """Of all children, in the order they are shown."""
        return list(self._commands)

    def child(self, name: str) -> Child:
        """The newest process of that name."""
        return self._children[name]

    async def start(self) -> None:
        """Starts every process; none waits for another."""
        for name in self.names:
            self.release(name)
            await self._spawn(name)

    async def wait_serving(self) -> None:
        """Returns when every child serves; StackFailed when one ends first or time is up."""
        try:
            async with asyncio.timeout(self.options.start_limit_s):
                await _all([self._until_serving(name) for name in self.names])
        except TimeoutError:
            late = [name for name in self.names if name not in self.serving_s]
            words = "; ".join(self._children[name].obituary() for name in late)
            raise StackFailed(f"not serving after {self.options.start_limit_s:.0f} s: {words}") from None

    async def supervise(self) -> None:
        """Starts again what ends, until cancelled. StackFailed when a child has ended too often."""
        await _all([self._keep_alive(name) for name in self.names])

    def hold_down(self, name: str) -> None:
        """SIGKILL, and no restart until `release`."""
        self._may_run[name].clear()
        self._children[name].kill()

    def release(self, name: str) -> None:
        """Lets supervision start it again."""
        self._may_run[name].set()

    async def wait_redis(self, *, timeout_s: float) -> None:
        """Returns when Redis answers; StackFailed when it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                async for up in self._probes(REDIS):
                    if up:
                        return
        except TimeoutError:
            raise StackFailed(f"Redis does not answer {timeout_s:.0f} s after its start") from None

    async def stop(self) -> None:
        """Ends every process, then whatever they left behind. Safe to call at any time."""
        self._stopping = True
        # The router first, so that it does not see its workers leave one by one.
        for names in ([ROUTER], self.workers, [REDIS]):
            await asyncio.gather(*(self._children[name].stop(STOP_GRACE_S) for name in names if name in self._children))
        self.strays = marked(self.stack_id)
        for pid in self.strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _spawn(self, name: str) -> None:
        environment = {**os.environ, MARK: self.stack_id}
        log = self.directory / f"{name}.log"
        self._children[name] = await Child.start(name, self._commands[name], log=log, environment=environment)

    async def _until_serving(self, name: str) -> None:
        child = self._children[name]
        async for up in self._probes(name):
            if up:
                self.serving_s[name] = time.monotonic() - self.began
                return
            if not child.running:
                raise StackFailed(child.obituary())

    async def _probes(self, name: str) -> AsyncIterator[bool]:
        port = self.ports[name]
        if name == REDIS:
            while True:
                yield await local_redis.answers(port)
                await asyncio.sleep(POLL_S)
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
        async with grpc.aio.insecure_channel(f"{HOST}:{port}", options=options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                yield await _grpc_serves(stub)
                await asyncio.sleep(POLL_S)

    async def _keep_alive(self, name: str) -> None:
        for _ in range(MAX_RESTARTS):
            await self._children[name].ended()
            if self._stopping:
                return
            self._say(self._children[name].obituary(num_lines=2))
            await self._may_run[name].wait()
            self._say(f"starting {name} again")
            await self._spawn(name)
        await self._children[name].ended()
        raise StackFailed(f"ended {MAX_RESTARTS + 1} times: {self._children[name].obituary()}")

    def _choose_ports(self) -> dict[str, int]:
        with free_ports() as take:
            ports = {REDIS: take(0)} if local_redis.command() else {}
            ports[ROUTER] = take(self.options.port)
            ports |= {name: take(0) for name in self.workers}
            self.metrics_ports = {name: take(0) for name in (ROUTER, *self.workers)}
            return ports

    def _all_commands(self) -> dict[str, list[str]]:
        ostrya = [sys.executable, "-m", "ostrya.cli.main"]
        common = ["--host", HOST]
        # Without one of our own, port 1: a Redis that happens to run on this machine is not ours to use.
        common += ["--redis-url", f"redis://{HOST}:{self.ports.get(REDIS, 1)}/0"]
        commands = {}
        if self.has_redis:
            commands[REDIS] = [*local_redis.command(), *local_redis.options(self.ports[REDIS], self.directory)]
        known = [part for name in self.workers for part in ("--static-workers", f"{HOST}:{self.ports[name]}")]
        served, computed = self._model()
        commands[ROUTER] = [*ostrya, "router", *common, *served, *self._ports_of(ROUTER), *known]
        for name in self.workers:
            own = ["--worker-id", name, *self._ports_of(name), *computed, *self.options.worker_options]
            commands[name] = [*ostrya, "worker", *common, *own]
        return commands

    def _model(self) -> tuple[list[str], list[str]]:
        """Options of the router and of workers."""
        options, simulated = self.options, self.options.simulated
        if simulated is not None:
            served = ["--model", simulated.tokenizer, "--model-name", simulated.name]
            computed = ["--model", options.model, "--model-name", simulated.name]
            return served, [*computed, "--backend", "roofline", "--slice", options.slice, *simulated_size()]
        model = ["--model", options.model]
        threads = max(1, (os.cpu_count() or 1) // len(self.workers))
        size = ["--num-threads", str(threads), "--num-pages", str(NUM_PAGES)]
        where = ["--backend", options.backend, "--tensor-parallel", str(options.tensor_parallel)]
        return model, [*model, *size, *where, "--dtype", options.dtype, "--weights", options.weights]

    def _ports_of(self, name: str) -> list[str]:
        return ["--port", str(self.ports[name]), "--metrics-port", str(self.metrics_ports[name])]


def simulated_size() -> list[str]:
    """Options of a simulated worker that are as they would be on TPU."""
    sizes = {
        "page-size": TPU_PAGE_SIZE,
        "max-running": TPU_MAX_RUNNING,
        "max-step-tokens": TPU_STEP_TOKENS,
        "max-prefill-chunk-tokens": TPU_STEP_TOKENS,
    }
    return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


@asynccontextmanager
async def running(options: StackOptions, directory: Path, say: Callable[[str], None]) -> AsyncIterator[Stack]:
    """A started stack, stopped on every way out."""
    stack = Stack(options, directory, say)
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop()


async def _all(works: Sequence[Coroutine[object, object, None]]) -> None:
    """Runs them together; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _grpc_serves(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)  # type: ignore[attr-defined]
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
