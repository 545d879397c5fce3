"""A fake worker in a process of its own, which a test can stop: `python -m tests.fakes.worker_server WORKER_ID`.

Prints its address, serves until stdin ends.
"""

import asyncio
import sys

from tests.fakes.tokenizer import byte_tokenizer
from tests.fakes.worker import FakeWorker, Identity


async def main(worker_id: str) -> None:
    """Serves model `tiny` as the byte tokenizer has it."""
    identity = Identity(worker_id=worker_id, tokenizer_fingerprint=byte_tokenizer().fingerprint)
    async with FakeWorker(identity) as worker:
        print(worker.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
