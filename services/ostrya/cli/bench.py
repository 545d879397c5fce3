"""`ostrya bench`: load a running router and report what its clients saw."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ostrya.cli.report import DEFAULT_TARGET, FAILED, AsJson, Target, fail, reported, show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from ostrya.cli.load import Plan, Prompt, Sample
    from ostrya.client import AsyncClient


def bench(
    target: Target = DEFAULT_TARGET,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time; not used with --rate.")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second, Poisson arrivals; 0 = --concurrency.")] = 0.0,
    requests: Annotated[int, typer.Option(min=1, help="End after so many.")] = 100,
    duration_s: Annotated[float, typer.Option(min=0, help="Start none after so many seconds.")] = 600.0,
    prefix_groups: Annotated[int, typer.Option(min=1, help="Different shared prefixes.")] = 4,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a shared prefix.")] = 256,
    suffix_tokens: Annotated[int, typer.Option(min=1, help="Tokens after it, new each time.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate; end of sequence is ignored.")] = 32,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSONL: text, messages or token_ids on each line."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Longest a request may take.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a running router: time to first token, between tokens, end to end; throughput; cached share; errors."""
    from rich.console import Console

    from ostrya.cli.load import Plan, Synthetic, from_file
    from ostrya.cli.summary import summarise
    from ostrya.client import AsyncClient

    plan = Plan(
        concurrency=concurrency,
        rate_per_s=rate,
        max_requests=requests,
        max_duration_s=duration_s,
        timeout_s=timeout_s,
        seed=seed,
    )

    async def measure() -> "tuple[list[Sample], float]":
        async with AsyncClient(target) as client:
            models = await client.models()
            if not models or not models[0].num_replicas_ready:
                fail(f"{target} has no replica ready; see `ostrya workers`")
            synthetic = Synthetic(
                prefix_groups=prefix_groups,
                prefix_tokens=prefix_tokens,
                suffix_tokens=suffix_tokens,
                max_tokens=max_tokens,
                vocab_size=models[0].vocab_size,
                seed=seed,
            )
            return await _run(client, plan, given or synthetic.prompts(), Console(stderr=True))

    with reported():
        given = from_file(prompts, max_tokens=max_tokens) if prompts else None
        samples, wall_s = asyncio.run(measure())
        _print(summarise(samples, wall_s), as_json=as_json)
        if all(one.error for one in samples):
            raise typer.Exit(FAILED)


async def _run(
    client: "AsyncClient", plan: "Plan", prompts: "Iterator[Prompt]", console: "Console"
) -> "tuple[list[Sample], float]":
    """The load, with a progress line that says what has been seen so far."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ostrya.cli.load import run
    from ostrya.cli.summary import percentile

    samples: list[Sample] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=plan.max_requests)

        def seen(sample: "Sample") -> None:
            samples.append(sample)
            recent = [one.ttft_s for one in samples[-100:] if not one.error]
            num_failed = sum(bool(one.error) for one in samples)
            words = f"first token p50 {percentile(recent, 50) * 1e3:.0f} ms, {num_failed} failed"
            progress.update(task, advance=1, description=words)

        wall_s = await run(client, plan, prompts, seen)
    return samples, wall_s


def _print(summary: dict[str, object], *, as_json: bool) -> None:
    import json

    from rich.table import Table
    from rich.text import Text

    if as_json:
        print(json.dumps(summary, indent=2))
        return
    latencies = Table("ms, simulated" if "simulated" in summary else "ms", "p50", "p90", "p99")
    for name in ("ttft_ms", "inter_token_ms", "end_to_end_ms"):
        row = summary.pop(name)
        assert isinstance(row, dict)
        latencies.add_row(
            name.removesuffix("_ms").replace("_", " "),
            *("-" if value is None else str(value) for value in row.values()),
        )
    errors, first = summary.pop("errors"), summary.pop("first_errors")
    assert isinstance(errors, dict)
    assert isinstance(first, dict)
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in summary.items()]
    lines += [f"{count} {kind}, the first: {first[kind]}" for kind, count in errors.items()]
    show(latencies, Text("\n".join(lines if errors else [*lines, "no errors"])))
