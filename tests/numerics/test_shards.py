"""The CPU backend over gloo: two processes that have half the model each give the tokens of one that has it all."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ostrya.cli.ports import free_ports
from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.types import TokenScore
from tests.numerics import workload
from tests.numerics.tiny_families import FAMILIES

Answers = tuple[dict[str, list[int]], dict[str, list[TokenScore]]]


def alone(path: Path, *, sampled: bool) -> Answers:
    config = workload.config(str(path))
    runner, model = load_runner(config)
    found = workload.answers(runner, config, vocab_size=model.vocab_size, sampled=sampled)
    runner.close()
    return found


def together(path: Path, *, size: int, sampled: bool) -> list[Answers]:
    """Of each process."""
    with free_ports() as take:
        port = take(0)
    job = {"path": str(path), "size": size, "rendezvous": f"127.0.0.1:{port}", "sampled": sampled}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.numerics.shard_process", json.dumps({**job, "rank": rank})],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    printed = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size
    return [msgspec.json.decode(line, type=Answers) for line in printed]


@pytest.mark.parametrize(("name", "sampled"), [("qwen2", False), ("qwen3", True), ("gemma3", False)])
def test_two_processes_give_the_tokens_of_one(name: str, sampled: bool, tmp_path: Path) -> None:
    path = FAMILIES[name].write(tmp_path / "m")
    expected, expected_scores = alone(path, sampled=sampled)
    for found, scores in together(path, size=2, sampled=sampled):
        assert workload.differences(found, expected) == []
        assert scores.keys() == expected_scores.keys()
        for request, of_request in scores.items():
            logprobs = [one.logprob for one in of_request]
            assert logprobs == pytest.approx([one.logprob for one in expected_scores[request]], abs=1e-4)
