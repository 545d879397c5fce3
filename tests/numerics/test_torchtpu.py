"""The torchtpu backend on a stand-in for torch_tpu: one process and two give the tokens of the CPU backend, and ask
torch_tpu for what it can do well. A program that is made after warm-up ends these processes (tests/fakes/tpu.py)."""

from collections import Counter
from pathlib import Path

import pytest

from ostrya.engine.buckets import ladder
from tests.fakes import tpu
from tests.numerics import workload
from tests.numerics.shard_process import Job, run, together
from tests.numerics.tiny_families import FAMILIES

FACTORY = "tests.fakes.tpu:load_runner"
LIMIT_S = 900.0
"""Twenty seconds alone; collectives between processes wait for processors."""


@pytest.mark.parametrize(("name", "size", "sampled"), [("qwen3", 1, True), ("qwen3", 2, False), ("qwen2", 2, True)])
def test_torchtpu_gives_the_tokens_of_the_cpu_backend(name: str, size: int, sampled: bool, tmp_path: Path) -> None:
    job, log = Job(path=str(FAMILIES[name].write(tmp_path / "m")), sampled=sampled), tmp_path / "log"
    expected, expected_scores = run(job)
    job.factory = FACTORY
    for found, scores in together(job, size=size, timeout_s=LIMIT_S, environment=tpu.environment(log)):
        assert workload.differences(found, expected) == []
        assert scores.keys() == expected_scores.keys()
        for request, of_request in scores.items():
            logprobs = [one.logprob for one in of_request]
            assert logprobs == pytest.approx([one.logprob for one in expected_scores[request]], abs=1e-4)
    assert_asked_well(log, path=job.path, size=size, num_layers=FAMILIES[name].size("num_hidden_layers"))


def assert_asked_well(log: Path, *, path: str, size: int, num_layers: int) -> None:
    """Everything in the environment before the import; one program a shape, none later; two sums a layer inside it,
    and nothing written in place."""
    config = workload.config(path)
    shapes = ladder(
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        page_size=config.page_size,
        context_tokens=workload.CONTEXT_TOKENS,
    )
    num_programs = {"step": len(shapes.buckets), "logits_at": len({bucket.tokens for bucket in shapes.buckets})}
    if size > 1:
        num_programs["whole"] = len(shapes.rows)
    sums = {"all_reduce": 2 * num_layers + 1, "all_gather_into_tensor": 1} if size > 1 else {}
    gathered = {"all_gather_into_tensor": 1} if size > 1 else {}
    for rank in range(size):
        (imported,) = (one for one in tpu.events(log, "import") if one["rank"] == rank)
        environment = imported["environment"]
        assert isinstance(environment, dict)
        assert environment["TORCH_TPU_INTERNAL_MATERIALIZE_COLLECTIVE_TENSORS"] == "false"
        assert environment["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count(":") == size
        asked = {one["fn"]: one["num_shapes"] for one in tpu.events(log, "async_compile") if one["rank"] == rank}
        assert asked == num_programs
        made = [one for one in tpu.events(log, "compile") if one["rank"] == rank]
        assert Counter(one["fn"] for one in made) == num_programs
        assert all(one["num_written"] == 0 for one in made)
        for one in made:
            collectives = {name: n for name, n in one["collectives"].items() if name != "wait_tensor"}
            assert collectives == (sums if one["fn"] == "step" else gathered)
