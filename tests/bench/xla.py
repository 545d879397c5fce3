"""SmolLM2 on backend xla, on XLA's CPU device: what a bucket costs to compile beside the unrolled `openxla` build of
the same step, what a step costs the host, and the device beside backend cpu. Proportions, not limits: run it on a
machine that does nothing else.

    .venv-xla/bin/python -m tests.bench.xla [--devices 4] [--dtype bfloat16] [--no-openxla] [--steps 1000]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ostrya.engine import buckets
from ostrya.engine.backends import cpu, xla
from ostrya.engine.backends.base import Runner
from ostrya.engine.backends.step_inputs import Layout
from ostrya.engine.backends.xla_step import step_of
from ostrya.engine.config import EngineConfig
from ostrya.engine.plan import Bucket, StepPlan
from ostrya.text.source import resolve_model
from tests.numerics.driver import Running, make_plan

T = TypeVar("T")
ROWS, KV_TOKENS, PAGE_SIZE = 16, 200, 16
NUM_TIMED = 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-openxla", action="store_true")
    parser.add_argument("--steps", type=int, default=1000, help="After which memory is looked at again.")
    asked = parser.parse_args()
    config = EngineConfig(
        model_path=str(resolve_model("smollm2-135m-instruct").path),
        model_name="m",
        tokenizer_fingerprint="",
        backend="xla",
        tensor_parallel=asked.devices,
        dtype=asked.dtype,
        num_pages=512,
        max_context_tokens=1024,
    )
    print(f"SmolLM2-135M, {asked.dtype}, {asked.devices} XLA:CPU devices, {ROWS} rows of {KV_TOKENS} tokens")
    plan = decode_plan()
    runner, model = xla.load_runner(config)
    bucket_s = on_device(runner, lambda: runner._compiled(plan.bucket)).compile_s
    print(f"loaded in {model.load_s:.1f} s; one bucket compiled in {bucket_s:.1f} s")
    if not asked.no_openxla:
        openxla_s = on_device(runner, lambda: openxla(runner, plan.bucket))
        print(f"  by torch.compile(backend='openxla'): {openxla_s:.1f} s; ours takes {bucket_s / openxla_s:.2f} of it")
    launch_s, step_s = timed(runner, plan)
    print(f"a step: {1e3 * step_s:.0f} ms, of which the host {1e3 * launch_s:.2f} ms before it is launched")
    before = rss_mb()
    for _ in range(asked.steps):
        runner.execute(plan).tokens()
    kv_mb = sum(one.nbytes for one in runner._kv) / 1e6
    print(f"{asked.steps} steps later: {rss_mb() - before:+.0f} MB beside {kv_mb:.0f} MB of keys and values")
    beside, _ = cpu.load_runner(msgspec.structs.replace(config, backend="cpu", tensor_parallel=1, weights="auto"))
    cpu_s = best(beside, plan)
    print(f"the same step on backend cpu: {1e3 * cpu_s:.0f} ms; xla takes {step_s / cpu_s:.1f} times as long")
    ladder = buckets.ladder(
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        page_size=PAGE_SIZE,
        context_tokens=1024,
        growth=runner.growth,
    )
    warm_s = time.perf_counter()
    runner.warm_up(ladder.buckets)
    warm_s = time.perf_counter() - warm_s + bucket_s
    print(f"{len(ladder.buckets)} buckets in {warm_s:.0f} s: SERVING {model.load_s + warm_s:.0f} s after the start")
    runner.close()


def decode_plan() -> StepPlan:
    num_pages = -(-KV_TOKENS // PAGE_SIZE)
    rows = [
        (Running([7] * KV_TOKENS, list(range(1 + row * num_pages, 1 + (row + 1) * num_pages)), KV_TOKENS - 1), 1)
        for row in range(ROWS)
    ]
    return make_plan(rows, page_size=PAGE_SIZE, pages_per_row=16)


def openxla(runner: xla.XlaRunner, bucket: Bucket) -> float:
    """Seconds until its first result is there."""
    devices, made = runner._devices, runner._model
    layout = Layout(bucket, runner._attention(bucket))
    packed = devices.put(torch.zeros(sum(layout.sizes), dtype=torch.int32))
    last_tokens_L = devices.put(torch.zeros(made.num_last, dtype=torch.int32))
    kv = runner._empty_kv()
    with torch.no_grad():
        # As a graph of plain operators: dynamo does not follow our objects.
        traced = make_fx(step_of(made, layout))(packed, last_tokens_L, *kv)
        kv = runner._empty_kv()
        compiled = torch.compile(traced, backend="openxla")
        began = time.perf_counter()
        compiled(packed, last_tokens_L, *kv)[0].cpu()
    return time.perf_counter() - began


def timed(runner: xla.XlaRunner, plan: StepPlan) -> tuple[float, float]:
    """Seconds on the host until it is launched, and until its tokens are there. Of the first the least: XLA:CPU begins
    some runs on the thread that launches them."""
    launches, steps = [], []
    for _ in range(NUM_TIMED):
        began = time.perf_counter()
        launched = on_device(runner, lambda: (time.perf_counter(), runner._step(plan), time.perf_counter()))
        launched[1].tokens_L.cpu()
        steps.append(time.perf_counter() - began)
        launches.append(launched[2] - launched[0])
    return min(launches), statistics.median(steps)


def best(runner: Runner, plan: StepPlan) -> float:
    seconds = []
    for _ in range(NUM_TIMED):
        began = time.perf_counter()
        runner.execute(plan).tokens()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def on_device(runner: xla.XlaRunner, work: Callable[[], T]) -> T:
    return runner._on_device(work)


def rss_mb() -> float:
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1e3


if __name__ == "__main__":
    main()
