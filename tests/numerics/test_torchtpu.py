"""The torchtpu backend on a stand-in for torch_tpu: one process and two give the tokens of the CPU backend, and ask
torch_tpu for what it can do well."""

from pathlib import Path

import pytest

from tests.fakes import tpu
from tests.numerics import workload
from tests.numerics.shard_process import Job, run, together
from tests.numerics.tiny_families import FAMILIES

FACTORY = "tests.fakes.tpu:load_runner"


@pytest.mark.parametrize(
    ("name", "size", "sampled"), [("qwen3", 1, False), ("qwen3", 2, False), ("qwen2", 2, True), ("gemma3", 1, True)]
)
def test_torchtpu_gives_the_tokens_of_the_cpu_backend(name: str, size: int, sampled: bool, tmp_path: Path) -> None:
    job = Job(path=str(FAMILIES[name].write(tmp_path / "m")), sampled=sampled)
    expected, expected_scores = run(job)
    log = tmp_path / "log"
    job.factory = FACTORY
    for found, scores in together(job, size=size, environment=tpu.environment(log)):
        assert workload.differences(found, expected) == []
        assert scores.keys() == expected_scores.keys()
        for request, of_request in scores.items():
            logprobs = [one.logprob for one in of_request]
            assert logprobs == pytest.approx([one.logprob for one in expected_scores[request]], abs=1e-4)
    print(log.read_text())
