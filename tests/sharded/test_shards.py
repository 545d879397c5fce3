"""The CPU backend over gloo: two processes that have half the model each give the tokens of one that has it all."""

from pathlib import Path

import pytest

from ostrya.engine.backends.cpu import load_runner
from ostrya.errors import ConfigError
from tests.numerics.tiny_families import FAMILIES
from tests.sharded import workload
from tests.sharded.shard_process import Job, run, together


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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # Prefill by all-to-all, decoding by own experts over all tokens.
        ("mixtral", {"expert_parallel": 2, "expert_exchange_tokens": 12}),
        ("qwen2-moe", {}),
    ],
)
def test_two_processes_with_half_the_experts_or_half_of_each_give_the_tokens_of_one(
    name: str, settings: dict[str, int], tmp_path: Path
) -> None:
    job = Job(path=str(FAMILIES[name].write(tmp_path / "m")))
    expected, _ = run(job)
    job.settings = settings
    for found, _ in together(job, size=2):
        assert workload.differences(found, expected) == []


def test_groups_of_experts_that_the_processes_do_not_divide_by_are_refused(tmp_path: Path) -> None:
    config = workload.config(str(FAMILIES["mixtral"].write(tmp_path / "m")), expert_parallel=2)
    with pytest.raises(ConfigError, match="expert_parallel is 2; it must divide the 1 processes"):
        load_runner(config)
