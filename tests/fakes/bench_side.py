"""A side of tests.bench that computes nothing. Argument: after how many answers it kills itself."""

import os
import signal
from itertools import count

from tests.bench.answering import Generate, answer


def load(arguments: list[str]) -> Generate:
    answers = count()

    def generate(prompts: list[list[int]], num_new: int) -> None:
        if next(answers) == int(arguments[0]):
            os.kill(os.getpid(), signal.SIGILL)

    return generate


if __name__ == "__main__":
    answer(load)
