"""Makes deploy/observability/screenshots: some minutes in the life of a pool, drawn. `python -m tests.ops.screenshots`.

Load that changes, requests that wait, clients that leave, a worker that is killed and one that is drained.
"""

import sys
import time

from deploy.observability import plot
from deploy.observability.generate import DIRECTORY
from ostrya.client import Client
from tests.integration.stack import RunningStack
from tests.ops.observed import Observed, finish, observed

OUT = DIRECTORY.parent / "screenshots"
NOTE = "SmolLM2-135M on two CPU cores under ostrya bench; Kubernetes API and TPU chips are stand-ins"


def live(pool: Observed) -> None:
    """A few minutes."""
    calm = pool.bench(requests=150, concurrency=3)
    pool.go_away()
    finish(calm)
    busy = pool.bench(requests=320, concurrency=12, max_tokens=32)
    time.sleep(15)  # so that the picture shows the time before
    pool.go_away()
    _replace(pool.stack, "worker-1")
    finish(busy)
    pool.keep_waiting(4)
    steady = pool.bench(requests=240, concurrency=6)
    with Client(pool.stack.target) as client:
        client.drain("worker-0", drain_timeout_s=30)
        time.sleep(5)  # drained, and seen so
        client.uncordon("worker-0")
    pool.go_away()
    finish(steady)
    pool.wait_scraped()


def _replace(stack: RunningStack, worker: str) -> None:
    """Killed, and started again as Kubernetes would."""
    stack.processes[worker].kill()
    stack.restart(worker)


def main() -> int:
    """The command; takes about five minutes."""
    with observed() as pool:
        live(pool)
        minutes = (time.time() - pool.since) / 60
        files = [str(path) for path in sorted(DIRECTORY.glob("*.json"))]
        asked = ["--prometheus", pool.server.url, "--minutes", f"{minutes:.2f}", "--rate-interval", "10s"]
        return plot.main([*asked, "--note", NOTE, "--out", str(OUT), *files])


if __name__ == "__main__":
    sys.exit(main())
