"""One of the processes that compute a model together on CPU: `python -m tests.sharded.shard_process JOB`, JOB in JSON.
Prints its answers. Each runs the same requests, and so makes the same plans as the others.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ostrya.cli.ports import free_ports
from ostrya.engine.backends.base import factory_of
from ostrya.engine.types import TokenScore
from ostrya.engine.world import World
from tests.sharded import workload

Answers = tuple[dict[str, list[int]], dict[str, list[TokenScore]]]


class Job(msgspec.Struct, kw_only=True):
    path: str
    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    sampled: bool = False
    factory: str = "ostrya.engine.backends.cpu:load_runner"
    settings: dict[str, int] = {}
    """Of the engine, beyond the workload's."""
    prompts: list[list[int]] = []
    """Asked all at once, instead of the workload."""


def run(job: Job) -> Answers:
    """What this process computes, alone or with the others."""
    world = World(rank=job.rank, size=job.size, rendezvous=job.rendezvous)
    config = workload.real_config(job.path) if job.prompts else workload.config(job.path, **job.settings)
    load_runner = factory_of(job.factory)
    runner, model = load_runner(config, world)
    if job.prompts:
        found = workload.answers_at_once(runner, config, job.prompts), dict[str, list[TokenScore]]()
    else:
        found = workload.answers(runner, config, vocab_size=model.vocab_size, sampled=job.sampled)
    runner.close()
    return found


def together(
    job: Job, *, size: int, timeout_s: float = 200, environment: Mapping[str, str] | None = None
) -> list[Answers]:
    """What each of `size` processes computes."""
    with free_ports() as take:
        rendezvous = f"127.0.0.1:{take(0)}"
    jobs = [msgspec.structs.replace(job, rank=rank, size=size, rendezvous=rendezvous) for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharded.shard_process", msgspec.json.encode(one).decode()],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **(environment or {})},
        )
        for one in jobs
    ]
    printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size
    return [msgspec.json.decode(line, type=Answers) for line in printed]


if __name__ == "__main__":
    print(json.dumps(msgspec.to_builtins(run(msgspec.json.decode(sys.argv[1], type=Job)))))
