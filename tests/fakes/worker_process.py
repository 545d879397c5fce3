"""A real worker process with the fake runner: `python -m tests.fakes.worker_process SETTINGS CONFIG FACTORY` (JSON)."""

import asyncio
import sys

import msgspec

from ostrya.engine.config import EngineConfig
from ostrya.worker.app import serve
from ostrya.worker.settings import WorkerSettings

if __name__ == "__main__":
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
    config = msgspec.json.decode(sys.argv[2], type=EngineConfig)
    sys.exit(asyncio.run(serve(settings, config, factory=sys.argv[3])))
