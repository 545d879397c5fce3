"""The start of a stack as a person sees it: a table that moves on a terminal, a line per event without one."""

import asyncio
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ostrya.api.v1 import admin_pb2, worker_pb2, worker_pb2_grpc
from ostrya.errors import Unavailable

if TYPE_CHECKING:
    from ostrya.cli.stack import Stack
    from ostrya.client import AsyncClient

REFRESH_S = 0.1
READY_TIMEOUT_S = 15.0


async def wait_serving(stack: "Stack", console: Console) -> None:
    """Shows the start until every child serves. Raises what Stack.wait_serving raises."""
    waiting = asyncio.create_task(stack.wait_serving())
    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                while not waiting.done():
                    live.update(_table(stack), refresh=True)
                    await asyncio.wait({waiting}, timeout=REFRESH_S)
                live.update(_table(stack), refresh=True)
        else:
            await _print_events(stack, console, waiting)
        await waiting
    finally:
        waiting.cancel()


async def _print_events(stack: "Stack", console: Console, waiting: "asyncio.Task[None]") -> None:
    told: set[str] = set()
    while True:
        for name in [one for one in stack.names if one in stack.serving_s and one not in told]:
            told.add(name)
            console.print(f"{name}: serving after {stack.serving_s[name]:.1f} s")
        if waiting.done():
            return
        await asyncio.wait({waiting}, timeout=REFRESH_S)


def _table(stack: "Stack") -> Table:
    rows = Table("process", "address", "state", "seconds")
    for name in stack.names:
        served_s = stack.serving_s.get(name)
        if served_s is not None:
            state = "[green]serving[/green]"
        elif stack.child(name).running:
            state = "[yellow]starting[/yellow]"
        else:
            state = "[red]ended[/red]"
        elapsed_s = time.monotonic() - stack.began if served_s is None else served_s
        rows.add_row(name, f"127.0.0.1:{stack.ports[name]}", state, f"{elapsed_s:.1f}")
    return rows


async def wait_ready(client: "AsyncClient", num_replicas: int, *, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Returns when the router has so many READY replicas; Unavailable when it has not in time."""
    num = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                num = await num_ready(client)
                if num >= num_replicas:
                    return
                await asyncio.sleep(REFRESH_S)
    except TimeoutError:
        raise Unavailable(f"{num} of {num_replicas} replicas are READY after {timeout_s:.0f} s; see the logs") from None


async def weights_of(stack: "Stack", name: str) -> str:
    """How a worker keeps its matrices, in its words. Unavailable when it does not answer."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.ports[name]}") as channel:
        worker: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            return (await worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=READY_TIMEOUT_S)).weights
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{name} was ready and does not answer: {error.details()}") from None


async def num_ready(client: "AsyncClient") -> int:
    """Replicas that the router would send requests to."""
    try:
        response = await client.replicas(timeout_s=2.0)
    except Unavailable:
        return 0
    return sum(one.state == admin_pb2.REPLICA_STATE_READY for one in response.replicas)


def ostrya_command() -> str:
    """What runs this installation's `ostrya` when pasted into the shell that `up` was started from."""
    script = Path(sys.executable).with_name("ostrya")
    if not script.exists():
        return f"{near(Path(sys.executable))} -m ostrya.cli.main"
    found = shutil.which("ostrya")
    return "ostrya" if found and script.samefile(found) else near(script)


def near(path: Path) -> str:
    """As one would type it: relative below the working directory."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def how_to_talk(stack: "Stack") -> str:
    """For a person who has just started a stack."""
    target, ostrya = stack.target, ostrya_command()
    metrics = "\n".join(f"    http://127.0.0.1:{port}/metrics  {name}" for name, port in stack.metrics_ports.items())
    return f"""
Ready. From a shell:

    {ostrya} generate --target {target} "Why is the sky blue?"
    {ostrya} chat --target {target}
    {ostrya} workers --target {target}

From Python ({near(Path(sys.executable))}):

    from ostrya.client import Client

    with Client("{target}") as client:
        for chunk in client.generate(messages=[{{"role": "user", "content": "Why is the sky blue?"}}]):
            print(chunk.text, end="", flush=True)

Metrics:

{metrics}
"""
