"""The children's end of tests.bench.sides. Runs in the peers' venvs too, so it knows the standard library only.

Requests come on stdin, a line of JSON each: {"prompts", "num_new"}. Answers go to the pipe whose number is the first
argument: {"seconds"}, after one empty answer when the side is ready. stdout and stderr are a log.
"""

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], None]
"""Continues all prompts at once by so many tokens each, greedily, and never ends one early."""


def answer(load: Callable[[list[str]], Generate]) -> None:
    """Loads with the arguments that are left, then answers until stdin ends."""
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)
    with open(pipe, "w") as answers:
        generate = load(sys.argv[2:])
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            started = time.perf_counter()
            generate(request["prompts"], request["num_new"])
            print(json.dumps({"seconds": time.perf_counter() - started}), file=answers, flush=True)
