"""`make test-hog N=20`: the whole suite again and again on a busy machine, where a test that lies shows itself.

As many processes as there are cores do nothing but take them. Each run's output is kept; the last line says how many
runs failed. Exit code 1 if any did.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def hog(num_processes: int) -> Iterator[None]:
    """Takes that many cores."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # none outlives a killed run
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--hogs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="ostrya-hog-"))
    failed = 0
    with hog(asked.hogs):
        for number in range(1, asked.runs + 1):
            log, began = logs / f"{number}.log", time.monotonic()
            with log.open("wb") as output:
                code = subprocess.run(["make", "test"], cwd=ROOT, stdout=output, stderr=output, check=False).returncode
            failed += code != 0
            took_min = (time.monotonic() - began) / 60
            print(f"run {number}: {'failed' if code else 'passed'} in {took_min:.1f} min, {log}", flush=True)
    print(f"{failed} of {asked.runs} runs failed beside {asked.hogs} processes that take all they get")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
