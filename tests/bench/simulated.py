"""How true backend roofline is to its predictions, by rows: how long simulated decode steps take in an engine process
of its own, of what `ostrya capacity` expects. Where the quotient leaves 1, the host is the limit and not what it
simulates.

`python -m tests.bench.simulated [--model kimi-k3] [--slice tpu7x-16] [ROWS ...]`
"""

import argparse
import asyncio
import statistics
from dataclasses import dataclass

from ostrya.capacity.estimate import efficiency
from ostrya.capacity.published import Engine
from ostrya.capacity.step import Work, step_time
from ostrya.engine.backends.roofline_model import simulated
from ostrya.engine.config import EngineConfig
from ostrya.engine.process import EngineProcess
from ostrya.engine.types import EngineRequest, RequestId, Sampling, StepReport

NUM_STEPS, NUM_WARM = 200, 20
PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps with all rows and nothing else."""

    rows: int
    taken_s: list[float]
    expected_s: list[float]

    def __str__(self) -> str:
        ratios = [taken / expected for taken, expected in zip(self.taken_s, self.expected_s, strict=True)]
        errors_ms = sorted(
            abs(taken - expected) * 1e3 for taken, expected in zip(self.taken_s, self.expected_s, strict=True)
        )
        late_ms = errors_ms[int(0.95 * len(errors_ms))]
        return (
            f"{self.rows:6} rows: expected {statistics.mean(self.expected_s) * 1e3:7.2f} ms a step, taken / expected "
            f"{sum(self.taken_s) / sum(self.expected_s):.4f} over all, median {statistics.median(ratios):.4f}; "
            f"off by {statistics.median(errors_ms):.2f} ms at the median, {late_ms:.2f} at p95"
        )


async def measure(model: str, slice_: str, rows: int) -> Measured:
    """One engine, `rows` requests that decode together."""
    config = EngineConfig(
        model_path=model,
        model_name=model,
        tokenizer_fingerprint="",
        backend="roofline",
        slice=slice_,
        page_size=64,
        max_running=rows,
        max_step_tokens=max(2048, rows),
        max_prefill_chunk_tokens=2048,
    )
    found = simulated(config)
    factors = efficiency(Engine.SERVING, found.where.chip.name)
    reports: list[StepReport] = []
    engine = await EngineProcess.start(config, max_waiting=rows)
    try:
        engine.listen(reports.append)
        await asyncio.gather(*(_answer(engine, number) for number in range(rows)))
    finally:
        await engine.close()
    works = [
        (report.step_s, report.work)
        for report in reports
        if report.work is not None and report.limit is not None and report.limit.kind == "decode"
    ]
    full = [(taken_s, work) for taken_s, work in works if work.rows == rows][NUM_WARM:]

    def expected_s(kv_tokens: int) -> float:
        work = Work(num_requests=rows, context_tokens=kv_tokens / rows - 1)
        return step_time(found.spec, found.where, work, efficiency=factors).seconds

    return Measured(rows, [taken_s for taken_s, _ in full], [expected_s(work.kv_tokens) for _, work in full])


async def _answer(engine: EngineProcess, number: int) -> None:
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=number, max_tokens=NUM_STEPS)
    token_ids = [1000 + number + place for place in range(PROMPT_TOKENS)]
    request = EngineRequest(request_id=RequestId(str(number)), token_ids=token_ids, sampling=sampling)
    async for _ in engine.submit(request):
        pass


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=[1, 16, 64, 256, 512])
    parser.add_argument("--model", default="kimi-k3")
    parser.add_argument("--slice", default="tpu7x-16")
    given = parser.parse_args()
    print(f"{given.model} on {given.slice}, simulated")
    for rows in given.rows:
        print(asyncio.run(measure(given.model, given.slice, rows)), flush=True)


if __name__ == "__main__":
    main()
