"""A replica of two real processes: rank 0 plans, rank 1 replays, and gloo adds up what each computed."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from ostrya.engine.process import EngineProcess
from ostrya.engine.types import EngineRequest, RequestId, Sampling
from ostrya.errors import EngineDied
from tests.fakes.waiting import Stopwatch
from tests.numerics.tiny_families import FAMILIES
from tests.sharded import workload

WHOLE_S = 5.0


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def answers(process: EngineProcess, kinds: tuple[Sampling, ...]) -> list[list[int]]:
    """All at once; some of them share beginnings."""

    async def one(number: int) -> list[int]:
        sampling = msgspec.structs.replace(kinds[number % len(kinds)], ignore_eos=True)
        prompt = [3 + at * (1 + number % 3) % 80 for at in range(6 + 3 * number)]
        request = EngineRequest(request_id=RequestId(f"{number}"), token_ids=prompt, sampling=sampling)
        return [token_id async for output in process.submit(request) for token_id in output.token_ids]

    return await asyncio.gather(*map(one, range(12)))


async def test_two_ranks_give_the_tokens_of_one_and_fail_whole(tmp_path: Path) -> None:
    config = workload.config(str(FAMILIES["qwen3"].write(tmp_path / "m")))
    alone = await EngineProcess.start(config, timeout_s=100)
    try:
        expected = await answers(alone, workload.SAMPLED)
    finally:
        await alone.close()
    both = await EngineProcess.start(msgspec.structs.replace(config, tensor_parallel=2), timeout_s=100)
    try:
        # Rank 0 would have ended if rank 1 had chosen another token anywhere.
        assert await answers(both, workload.SAMPLED) == expected
        (rank,) = children(both.pid)
        dying = asyncio.create_task(answers(both, workload.SAMPLED))
        watch = Stopwatch(both.pid)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(
            EngineDied, match="the replica fails whole: rank 1 closed the connection: its process ended"
        ):
            await dying
        assert watch.seconds() < WHOLE_S
    finally:
        await both.close()
