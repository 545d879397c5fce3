"""What a following host does with a rank that nothing ends; all else with real processes, in tests/integration."""

import asyncio

import pytest

from ostrya.engine.config import EngineConfig
from ostrya.engine.world import Slice
from ostrya.errors import ModelLoadError
from ostrya.worker import following


class Held:
    """A process that has closed its output, and that a device driver keeps."""

    returncode = None

    def __init__(self) -> None:
        self.stdin, self.stdout = self, asyncio.StreamReader()
        self.stdout.feed_eof()

    def write(self, line: bytes) -> None: ...

    def kill(self) -> None: ...

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def test_a_rank_that_outlives_sigkill_ends_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(*command: str, **pipes: int) -> Held:
        return Held()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(following, "KILL_LIMIT_S", 0.01)
    config = EngineConfig(model_path="/", model_name="m", tokenizer_fingerprint="", tensor_parallel=2)
    host = following.Following(config, Slice(host=1, num_hosts=2), factory="m:f")
    with pytest.raises(ModelLoadError, match="still there"):
        async with asyncio.timeout(5):
            await host.run(stop=asyncio.Event())
