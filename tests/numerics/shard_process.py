"""One of the processes that compute a model together on CPU: `python -m tests.numerics.shard_process JOB`, JOB in JSON.
Prints its answers. Each runs the whole workload, and so makes the same plans as the others.
"""

import json
import sys

import msgspec

from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.world import World
from tests.numerics import workload


def main() -> None:
    job = json.loads(sys.argv[1])
    world = World(rank=job["rank"], size=job["size"], rendezvous=job["rendezvous"])
    config = workload.config(job["path"])
    runner, model = load_runner(config, world)
    found = workload.answers(runner, config, vocab_size=model.vocab_size, sampled=job["sampled"])
    runner.close()
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
