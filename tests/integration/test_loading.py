"""Loading as processes do it: a shard of a checkpoint in each, never all of it in any, and one number of KV pages."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostrya.api.v1 import worker_pb2, worker_pb2_grpc
from ostrya.engine.config import AUTO_PAGES, EngineConfig
from ostrya.service.server import channel
from ostrya.worker.settings import WorkerSettings
from tests.bench.loading import Sizes, load, write
from tests.integration.test_worker_process import NO_REDIS, RunningWorker
from tests.unit.engine.models.checkpoints import Tiny, write_gguf

NUM_PROCESSES = 2


def test_no_process_ever_holds_more_than_its_shard(tmp_path: Path) -> None:
    """A small `make bench-loading`, of 0.6 GB. The processes have different limits, and the least decides."""
    sizes = Sizes(num_layers=4, inner=5632)
    limits = [3 << 30, 2 << 30]
    found = load(write(tmp_path, sizes), NUM_PROCESSES, limits=limits, timeout_s=120)
    for one in found:
        assert one.shard_bytes < sizes.num_bytes / 1.99
        assert one.peak_bytes < sizes.num_bytes * 0.85
        assert one.fits
    (num_pages,) = {one.num_pages for one in found}
    (page_bytes,) = {one.page_bytes for one in found}
    used = [one.shard_bytes + num_pages * page_bytes for one in found]
    assert max(used) < 0.9 * min(limits) < max(used) + (64 << 20)


@contextmanager
def worker(tmp_path: Path, config: EngineConfig, settings: WorkerSettings) -> Iterator[RunningWorker]:
    running = RunningWorker(
        tmp_path / "log", factory="ostrya.engine.backends.cpu:load_runner", settings=settings, config=config
    )
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait(30)


async def test_everybody_is_told_the_number_of_pages_that_fit(tmp_path: Path) -> None:
    tiny = Tiny()
    limit = 24 << 20
    config = EngineConfig(
        model_path=str(write_gguf(tmp_path / "m.gguf", tiny, tiny.weights())),
        model_name="tiny",
        tokenizer_fingerprint="t",
        page_size=4,
        num_pages=AUTO_PAGES,
        memory_limit_bytes=limit,
        num_threads=1,
    )
    with worker(tmp_path, config, WorkerSettings(worker_id="w", redis_url=NO_REDIS, metric_aliases=True)) as running:
        listening = await asyncio.to_thread(running.fields, "listening")
        async with channel(str(listening["address"]), max_message_bytes=1 << 20) as open_channel:
            info = await worker_pb2_grpc.WorkerServiceStub(open_channel).GetInfo(worker_pb2.GetInfoRequest())
        num_pages = info.limits.num_pages
        assert num_pages > 100
        assert info.load.total_pages == num_pages - 1
        assert await running.metric("vllm:cache_config_info", num_gpu_blocks=str(num_pages - 1)) == 1
        parts = {
            part: await running.metric("ostrya_worker_memory_bytes", part=part)
            for part in ("weights", "scratch", "kv", "free", "limit")
        }
        assert parts.pop("limit") == limit == sum(parts.values())
        assert parts["kv"] % num_pages == 0
        assert 0.9 * limit < parts["weights"] + parts["scratch"] + parts["kv"] + parts["kv"] / num_pages
        assert await running.metric("ostrya_worker_load_bytes") == 4 * sum(map(math.prod, tiny.shapes().values()))
        # The engine process's own lines are in the worker's log.
        assert running.fields("weights are read")["logger"] == "ostrya.engine.models.reading"
        assert running.fields("memory of a device")["num_pages"] == num_pages
