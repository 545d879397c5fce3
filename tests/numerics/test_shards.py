"""The CPU backend over gloo: two processes that have half the model each give the tokens of one that has it all."""

from pathlib import Path

import pytest

from tests.numerics import workload
from tests.numerics.shard_process import Job, run, together
from tests.numerics.tiny_families import FAMILIES


@pytest.mark.parametrize(("name", "sampled"), [("qwen2", False), ("qwen3", True), ("gemma3", False)])
def test_two_processes_give_the_tokens_of_one(name: str, sampled: bool, tmp_path: Path) -> None:
    job = Job(path=str(FAMILIES[name].write(tmp_path / "m")), sampled=sampled)
    expected, expected_scores = run(job)
    for found, scores in together(job, size=2):
        assert workload.differences(found, expected) == []
        assert scores.keys() == expected_scores.keys()
        for request, of_request in scores.items():
            logprobs = [one.logprob for one in of_request]
            assert logprobs == pytest.approx([one.logprob for one in expected_scores[request]], abs=1e-4)
