"""The torchtpu backend on a stand-in for torch_tpu: one process and two give the tokens of the CPU backend, and ask
torch_tpu for what it can do well. A program that is made after warm-up ends these processes (tests/fakes/tpu.py)."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from ostrya.engine.buckets import Ladder, ladder
from ostrya.engine.config import EngineConfig
from ostrya.engine.models.source import open_source
from ostrya.engine.process import EngineProcess
from tests.fakes import tpu
from tests.numerics.tiny_families import FAMILIES
from tests.sharded import workload
from tests.sharded.shard_process import Job, run, together
from tests.sharded.test_replica import answers

FACTORY = "tests.fakes.tpu:load_runner"
FEW_SHAPES = {"max_step_tokens": 16}
"""Each takes a second to trace; what is answered depends on none."""
LIMIT_S = 900.0
"""Twenty seconds alone; collectives between processes wait for processors."""


@pytest.mark.parametrize(
    ("name", "size", "sampled", "kernel", "settings"),
    [
        ("qwen3", 1, True, "_with_kernel", {}),
        ("qwen3", 2, False, "", {}),
        # Prefill by all-to-all, decoding by own experts over all tokens.
        ("mixtral", 2, False, "", {"expert_parallel": 2, "expert_exchange_tokens": 12}),
    ],
)
def test_torchtpu_gives_the_tokens_of_the_cpu_backend(
    name: str, size: int, sampled: bool, kernel: str, settings: dict[str, int], tmp_path: Path
) -> None:
    job, log = Job(path=str(FAMILIES[name].write(tmp_path / "m")), sampled=sampled), tmp_path / "log"
    expected, expected_scores = run(job)
    settings |= FEW_SHAPES
    job.factory, job.settings = f"{FACTORY}{kernel}", settings
    for found, scores in together(job, size=size, timeout_s=LIMIT_S, environment=tpu.environment(log)):
        assert workload.differences(found, expected) == []
        assert scores.keys() == expected_scores.keys()
        for request, of_request in scores.items():
            logprobs = [one.logprob for one in of_request]
            assert logprobs == pytest.approx([one.logprob for one in expected_scores[request]], abs=1e-4)
    # Keys and values are handed over to the kernel, which hands them back.
    assert [one.donate_argnums for one in tpu.events(log, "jax_op")] == ([(0,)] if kernel else [])
    assert_asked_well(log, config=workload.config(job.path, **settings), size=size)


async def test_a_replica_of_two_torchtpu_processes_gives_the_tokens_of_the_cpu_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = workload.config(str(FAMILIES["qwen2"].write(tmp_path / "m")))
    alone = await EngineProcess.start(config, timeout_s=LIMIT_S)
    try:
        expected = await answers(alone, workload.SAMPLED)
    finally:
        await alone.close()
    for name, value in tpu.environment(tmp_path / "log").items():
        monkeypatch.setenv(name, value)
    config = msgspec.structs.replace(config, backend="torchtpu", tensor_parallel=2, max_step_tokens=16)
    both = await EngineProcess.start(config, factory=FACTORY, timeout_s=LIMIT_S)
    try:
        assert await answers(both, workload.SAMPLED) == expected
        assert both.load.num_late_shapes == 0
    finally:
        await both.close()


def assert_asked_well(log: Path, *, config: EngineConfig, size: int) -> None:
    """Everything in the environment before the import; one program a shape, none later; two sums a layer inside it,
    and nothing written in place."""
    shapes = ladder(
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        page_size=config.page_size,
        context_tokens=workload.CONTEXT_TOKENS,
    )
    num_programs = {"step": len(shapes.buckets), "logits_at": len({bucket.tokens for bucket in shapes.buckets})}
    if size > 1:
        num_programs["whole"] = len(shapes.rows)
    for rank in range(size):
        (imported,) = (one for one in tpu.events(log, "import") if one.rank == rank)
        assert imported.environment["TORCH_TPU_INTERNAL_MATERIALIZE_COLLECTIVE_TENSORS"] == "false"
        assert imported.environment["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count(":") == size
        asked = {one.fn: one.num_shapes for one in tpu.events(log, "async_compile") if one.rank == rank}
        assert asked == num_programs
        made = [one for one in tpu.events(log, "compile") if one.rank == rank]
        assert Counter(one.fn for one in made) == num_programs
        assert all(one.num_written == 0 for one in made)
        collectives = Counter(name for one in made for name, n in one.collectives.items() for _ in range(n))
        assert collectives == expected_collectives(config, shapes, size=size)


def expected_collectives(config: EngineConfig, shapes: Ladder, *, size: int) -> Counter[str]:
    """Of all programs: after the embedding and twice a layer a sum; one for the largest logits, one for whole ones."""
    if size == 1:
        return Counter()
    num_layers = len(open_source(Path(config.model_path)).spec.layers)
    num_steps, num_tokens = len(shapes.buckets), {bucket.tokens for bucket in shapes.buckets}
    num_exchanging = sum(bucket.tokens >= (config.expert_exchange_tokens or 1 << 30) for bucket in shapes.buckets)
    num_sums = num_steps * (2 * num_layers + 1) - num_exchanging * num_layers
    # Tokens go out, their choices go out, what experts add comes back; then each has the parts of all.
    num_gathers = num_steps + len(num_tokens) + len(shapes.rows) + num_exchanging * num_layers
    num_exchanges = 3 * num_exchanging * num_layers
    found = {"all_reduce": num_sums, "all_gather_into_tensor": num_gathers, "all_to_all_single": num_exchanges}
    num_waits = sum(found.values())
    return Counter({name: n for name, n in found.items() if n} | {"wait_tensor": num_waits})
