"""The CPU backend: plain torch, the embedded default and the reference for every other. The engine sees only base.py.
With several processes (world.py) each computes one shard: the explicit interpreter, over gloo.

One device thread runs all tensor code, loading included, so that the engine's own thread keeps planning and hearing
aborts while a step runs. A shape costs nothing to compile here; shapes are still counted, so that this backend shows
what a compiled one would.
"""

import ctypes
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from ostrya.engine.backends.base import FutureStep, LoadedModel, StepResult
from ostrya.engine.backends.collectives import Gloo
from ostrya.engine.backends.cpu_limit import CpuLimit
from ostrya.engine.backends.cpu_ops import CpuOps, MixerTables
from ostrya.engine.backends.cpu_weights import CpuBuilder
from ostrya.engine.backends.host_memory import available_bytes
from ostrya.engine.backends.host_sampling import choose
from ostrya.engine.backends.kernels.divided_sampling import gathered, sample_divided
from ostrya.engine.buckets import Growth
from ostrya.engine.config import EngineConfig
from ostrya.engine.memory import accounted, require_room, scratch_bytes
from ostrya.engine.models.decoder import forward, logits
from ostrya.engine.models.sharding import Mesh, Sharding
from ostrya.engine.models.source import open_source
from ostrya.engine.models.weights import read_weights
from ostrya.engine.plan import Bucket, StepPlan, fed_forward, scratch_plan
from ostrya.engine.world import ALONE, World

T = TypeVar("T")

# oneDNN prepares itself once for each number of rows; multiples keep these few.
_TOKEN_MULTIPLE = 16

_M_ARENA_MAX = -8
"""glibc's number of the setting."""


def load_runner(config: EngineConfig, world: World = ALONE) -> tuple["CpuRunner", LoadedModel]:
    """Reads the weights and sets the KV pages aside. ModelLoadError when they cannot be used, ConfigError for a
    context too long, or for a model that cannot be divided among the processes of `world`."""
    threads = max(1, (config.num_threads or os.cpu_count() or 1) * world.num_hosts // world.size)
    # Loading takes more memory than what stays. glibc keeps what is freed until it is told to trim (200 MB of 650 for
    # SmolLM2 at 4 bits), and what lies at the end of another arena than the first also then (100 MB).
    _glibc("mallopt", _M_ARENA_MAX, 1)
    # The thread count is per thread with OpenMP: set where the work is done.
    device = ThreadPoolExecutor(1, "device", initializer=partial(torch.set_num_threads, threads))
    started = time.perf_counter()
    try:
        runner = device.submit(_inference, lambda: CpuRunner(config, device, world)).result()
        load_s = time.perf_counter() - started
        # Both take memory and leave it: first what loading left goes, or the peak is the sum.
        _glibc("malloc_trim", 0)
        limit = device.submit(_inference, runner.measure_limit).result()
        _glibc("malloc_trim", 0)
    except BaseException:
        device.shutdown()
        raise
    return runner, LoadedModel(
        context_tokens=runner.context_tokens,
        vocab_size=runner.vocab_size,
        load_s=load_s,
        weights=runner.weights,
        load_bytes=runner.load_bytes,
        memory=runner.memory,
        num_pages=runner.memory.num_pages,
        limit=limit,
    )


class CpuRunner:
    """A Runner. Steps run one after another on the device thread."""

    growth = Growth()
    num_cached_shapes = 0

    def __init__(self, config: EngineConfig, device: ThreadPoolExecutor, world: World = ALONE) -> None:
        """On the device thread."""
        source = open_source(Path(config.model_path))
        self.context_tokens = config.context_within(source.spec.context_tokens)
        self.vocab_size = source.spec.vocab_size
        sharding = Sharding(source.spec, mesh := Mesh.of(world.size, num_groups=config.expert_parallel))
        self.spec = sharding.local
        limit_bytes = _memory_limit_bytes(config, world)
        require_room(source.spec, config, mesh, limit_bytes=limit_bytes)
        self._whole_spec, self._num_processes = source.spec, world.size
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        self._page_size = config.page_size
        self._collectives = Gloo(world) if world.size > 1 else None
        builder = CpuBuilder(
            self._dtype,
            config.weights,
            self._collectives,
            mesh=mesh,
            exchange_tokens=config.expert_exchange_tokens,
        )
        self._weights = read_weights(source, builder, sharding)
        self.load_bytes = source.num_bytes_read
        self._kept = builder.choose(config.max_running)
        self._tables = MixerTables(self.spec, num_positions=self.context_tokens)
        self.memory = accounted(
            self.spec,
            config,
            limit_bytes=limit_bytes,
            weights_bytes=builder.num_bytes,
            scratch_bytes=scratch_bytes(self.spec, config) + sum(table.nbytes for table in self._tables.rotary),
            least=self._least,
        )
        sizes = [layer.mixer.sizes for layer in self.spec.layers]
        self._kv_pages = [
            _lazy_zeros((self.memory.num_pages, config.page_size, 2 * size.num_kv_heads, size.head_dim), self._dtype)
            for size in sizes
        ]
        self._device = device
        self._last_tokens = np.zeros(1, np.int32)
        self._shapes: set[Bucket] = set()
        self._num_late_shapes = 0
        self._warm = False

    @property
    def weights(self) -> str:
        return self._kept.description

    @property
    def num_shapes(self) -> int:
        return len(self._shapes)

    @property
    def num_late_shapes(self) -> int:
        return self._num_late_shapes

    def measure_limit(self) -> CpuLimit:
        """Of all processes together, as this one finds them. On the device thread."""
        spec = self._whole_spec.model_spec("cpu")
        return CpuLimit.measured(spec, self._kept, dtype=self._dtype, num_processes=self._num_processes)

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        """Runs one decode and one prefill step over scratch page 0, so that no request pays for what torch sets up
        lazily."""
        for num_tokens in (1, 2):
            fitting = [bucket for bucket in buckets if bucket.tokens >= num_tokens]
            if fitting:
                self.execute(scratch_plan(min(fitting), num_tokens)).tokens()
        self._shapes.update(buckets)
        self._warm = True

    def execute(self, plan: StepPlan) -> FutureStep:
        if plan.bucket not in self._shapes:
            self._shapes.add(plan.bucket)
            self._num_late_shapes += self._warm
        return FutureStep(self._device.submit(_inference, partial(self._step, plan)))

    def close(self) -> None:
        self._device.shutdown(wait=True)
        self._kv_pages.clear()
        if self._collectives is not None:
            self._collectives.close()

    def _step(self, plan: StepPlan) -> StepResult:
        tokens, scores = self._run(fed_forward(plan, self._last_tokens))
        self._last_tokens = tokens
        return tokens, scores

    def _run(self, plan: StepPlan) -> StepResult:
        # Nothing is compiled for the shape, so most of the padding need not be computed.
        num_tokens = plan.num_tokens
        if num_tokens > self._kept.layer_rows:
            num_tokens = min(plan.bucket.tokens, -(-num_tokens // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE)
        num_logits = plan.num_rows if plan.num_rows <= self._kept.head_rows else plan.bucket.rows
        ops = CpuOps(plan, self._tables, num_tokens=num_tokens, page_size=self._page_size, dtype=self._dtype)
        token_ids_T = torch.from_numpy(plan.token_ids[:num_tokens])
        x_TD, _ = forward(ops, self.spec, self._weights, token_ids_T=token_ids_T, kv=self._kv_pages)
        logits_RV = logits(self._weights, x_TD, torch.from_numpy(plan.logits_index[:num_logits]))
        if self._collectives is not None and plan.scoring is None:
            return sample_divided(logits_RV, plan, self._collectives).int().numpy(), None
        return choose(plan, self._whole(logits_RV), lambda index_N: self._whole(logits(self._weights, x_TD, index_N)))

    def _least(self, num_pages: int) -> int:
        """Of all processes."""
        if self._collectives is None:
            return num_pages
        return int(self._collectives.gather(torch.tensor([num_pages])).min())

    def _whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Of the whole vocabulary."""
        return logits_RV if self._collectives is None else gathered(logits_RV, self._collectives)


def _inference(work: Callable[[], T]) -> T:
    with torch.inference_mode():
        return work()


def _glibc(function: str, *arguments: int) -> None:
    """Calls it where there is one."""
    if hasattr(libc := ctypes.CDLL(None), function):
        getattr(libc, function)(*arguments)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are written: numpy asks the operating system for them, torch.zeros fills
    them itself."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _memory_limit_bytes(config: EngineConfig, world: World) -> int | None:
    """Of one process, before it has loaded anything. It shares with those of its host."""
    if config.memory_limit_bytes is not None:
        return config.memory_limit_bytes
    available = available_bytes()
    return None if available is None else available * world.num_hosts // world.size
