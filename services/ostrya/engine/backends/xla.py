"""The XLA backend: the annotated interpreter, over one device or over all of a host's by SPMD. The engine sees base.py.

All shards stand in a leading dimension S that lies across the devices; the compiler makes collectives of sums over it.
Each bucket is one program, compiled before serving. Its keys and values are donated and updated in place; its greedy
tokens stay on the device, where the next step finds them. What more a row wants (a temperature, penalties, grammars,
log probabilities) is done on the host from the step's logits, by the code that serves backend cpu.

Two threads: one launches, one waits for tokens, so that the next step is launched while the one before runs.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from ostrya.capacity.chips import Chip
from ostrya.engine.backends import xla_bridge, xla_cache, xla_versions
from ostrya.engine.backends.base import FutureStep, LoadedModel, StepResult
from ostrya.engine.backends.exchange import StackedExchange
from ostrya.engine.backends.host_memory import available_bytes
from ostrya.engine.backends.host_sampling import SCORED_AT_ONCE, choose, is_greedy
from ostrya.engine.backends.kernels.block_attention import Blocks
from ostrya.engine.backends.kernels.ragged_attention import RaggedRows
from ostrya.engine.backends.static_ops import StaticBuilder, kv_shape
from ostrya.engine.backends.step_inputs import AttentionInputs, Layout
from ostrya.engine.backends.torchtpu_machine import this_machine
from ostrya.engine.backends.xla_bridge import Devices, Program
from ostrya.engine.backends.xla_step import Model, head_of, step_of, whole_of
from ostrya.engine.buckets import MIN_ROWS, Growth
from ostrya.engine.config import CPU_PAGES, EngineConfig
from ostrya.engine.memory import accounted, require_room, scratch_bytes
from ostrya.engine.models.sharding import Mesh, Sharding
from ostrya.engine.models.source import open_source
from ostrya.engine.models.weights import read_weights
from ostrya.engine.plan import Bucket, StepPlan, fed_forward, scratch_plan
from ostrya.engine.types import Memory
from ostrya.engine.world import ALONE, World
from ostrya.errors import ModelLoadError

T = TypeVar("T")

log = logging.getLogger(__name__)

REFUSE_LATE = "OSTRYA_REFUSE_LATE_SHAPES"
"""Set in tests: what would be compiled after warm-up fails instead of being counted."""
_BLOCKS_GROWTH = Growth(rows=4, tokens=8, pages=4)
"""A bucket takes seconds to compile there, and pages that a row does not have take time in every step."""
_KERNEL_GROWTH = Growth(pages=None)


class _Launched(NamedTuple):
    """A step on its way."""

    tokens_L: torch.Tensor
    """On the device."""
    done: StepResult | None
    """Of a step that the host had to look into."""


def load_runner(config: EngineConfig, world: World = ALONE) -> tuple["XlaRunner", LoadedModel]:
    """Reads the weights onto the devices of this host. ModelLoadError when they or torch_xla cannot be used,
    ConfigError for what cannot be divided so, or for more devices than there are."""
    started = time.perf_counter()
    device_thread = ThreadPoolExecutor(1, "device")
    try:
        runner = device_thread.submit(_loaded, config, device_thread).result()
    except BaseException:
        device_thread.shutdown()
        raise
    return runner, LoadedModel(
        context_tokens=runner.context_tokens,
        vocab_size=runner.vocab_size,
        load_s=time.perf_counter() - started,
        weights=runner.weights,
        load_bytes=runner.load_bytes,
        memory=runner.memory,
        num_pages=runner.memory.num_pages,
    )


@torch.no_grad()
def _loaded(config: EngineConfig, device_thread: ThreadPoolExecutor) -> "XlaRunner":
    # What is wrong with the installation or the model is known before a device is taken.
    if problem := xla_versions.installation_problem():
        raise ModelLoadError(problem)
    source = open_source(Path(config.model_path))
    mesh = Mesh.of(config.tensor_parallel, num_groups=config.expert_parallel)
    sharding = Sharding(source.spec, mesh)
    context_tokens = config.context_within(source.spec.context_tokens)
    devices = xla_bridge.start(config.tensor_parallel)
    identity = {
        **xla_versions.versions(),
        **xla_cache.flags(),
        "mesh": f"{mesh.expert} x {mesh.tensor} {devices.kind}",
        "model": repr(source.spec),
        "dtype": config.dtype,
        "page_size": str(config.page_size),
    }
    root = config.compile_cache or os.environ.get(xla_cache.ROOT_VARIABLE, "")
    cache = xla_cache.cache_directory(root, identity)
    if cache.problem:
        log.warning(cache.problem)
    xla_bridge.open_cache("" if cache.path is None else str(cache.path))
    local = sharding.local
    limit_bytes, chip = _memory_limit(config, devices)
    require_room(source.spec, config, mesh, limit_bytes=limit_bytes, chip=chip)
    placed = _Placed(devices)
    shards_S1 = torch.arange(mesh.num_shards, dtype=torch.int32)[:, None]
    builder = StaticBuilder(
        shard=None,
        first_token=shards_S1 * local.vocab_size,
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype],
        placed=placed,
        add_up=partial(torch.sum, dim=0),
        expert_group=shards_S1 // mesh.tensor,
        exchange=StackedExchange(mesh.num_shards, divided=lambda tensor: devices.marked(tensor, 0)),
        exchange_tokens=config.expert_exchange_tokens,
    )
    model = Model(
        spec=local,
        weights=read_weights(source, builder, sharding),
        page_size=config.page_size,
        marked=devices.marked,
        num_last=max(MIN_ROWS, 1 << (config.max_running - 1).bit_length()),
    )
    devices.wait()
    memory = accounted(
        local,
        config,
        limit_bytes=limit_bytes,
        weights_bytes=placed.device_bytes,
        scratch_bytes=scratch_bytes(local, config),
        # A CPU's memory is others' too, and the pool takes all of its own at once.
        least=lambda num_pages: num_pages if chip or config.memory_limit_bytes else min(num_pages, CPU_PAGES),
    )
    return XlaRunner(
        config,
        model,
        devices,
        device_thread,
        context_tokens=context_tokens,
        memory=memory,
        load_bytes=source.num_bytes_read,
    )


def _memory_limit(config: EngineConfig, devices: Devices) -> tuple[int | None, Chip | None]:
    """Of one device, and what it is. The runtime does not say under SPMD, so a TPU's comes from the table of chips."""
    chip = this_machine().chip if devices.is_tpu else None
    if config.memory_limit_bytes is not None:
        return config.memory_limit_bytes, chip
    if devices.is_tpu:
        return (chip.hbm_bytes // chip.devices_per_chip if chip else None), chip
    available = available_bytes()
    return (None if available is None else available // devices.count), None


class _Placed:
    """Puts tensors on the devices, and counts what one of them has."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self.device_bytes = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        is_divided = tensor.dim() > 2
        self.device_bytes += tensor.nbytes // (self._devices.count if is_divided else 1)
        return self._devices.put(tensor, divided=0 if is_divided else None)


class XlaRunner:
    """A Runner. Steps are launched by the device thread, one after another."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        devices: Devices,
        device_thread: ThreadPoolExecutor,
        *,
        context_tokens: int,
        memory: Memory,
        load_bytes: int,
    ) -> None:
        """On the device thread."""
        self.memory, self.load_bytes = memory, load_bytes
        self.context_tokens = context_tokens
        self.vocab_size = model.spec.vocab_size * devices.count
        self.growth = _KERNEL_GROWTH if devices.has_ragged_kernel else _BLOCKS_GROWTH
        shared = f" in {devices.count} parts" if devices.count > 1 else ""
        self.weights = f"{config.dtype}, dense, on {devices.kind}{shared}"
        self._model, self._devices = model, devices
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        self._num_slots = memory.num_pages * config.page_size
        self._device, self._results = device_thread, ThreadPoolExecutor(1, "results")
        self._programs: dict[Bucket, tuple[Layout, Program]] = {}
        self._head: Program | None = None
        self._whole: dict[int, Program] = {}
        """Of each number of rows."""
        self._kv: list[torch.Tensor] = []
        self._last_tokens_L = devices.put(torch.zeros(model.num_last, dtype=torch.int32))
        self._shapes: set[Bucket] = set()
        self._num_late_shapes = 0
        self._warm = False

    @property
    def num_shapes(self) -> int:
        return len(self._shapes)

    @property
    def num_late_shapes(self) -> int:
        return self._num_late_shapes

    @property
    def num_cached_shapes(self) -> int:
        stats = xla_bridge.compile_stats()
        return min(self.num_shapes, max(0, stats.num_hits - stats.num_unreadable))

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        """Compiles every bucket, then runs each once over scratch page 0."""
        began = time.perf_counter()
        buckets = [bucket for bucket in buckets if bucket not in self._programs]
        for number, bucket in enumerate(buckets, start=1):
            self._shapes.add(bucket)
            program = self._on_device(self._compiled, bucket)
            log.info(
                "compiled bucket %d of %d (%d tokens, %d rows, %d pages) in %.1f s",
                *(number, len(buckets), bucket.tokens, bucket.rows, bucket.pages, program.compile_s),
            )
        self._on_device(self._compiled_head)
        for num_rows in sorted({bucket.rows for bucket in buckets}):
            self._on_device(self._compiled_whole, num_rows)
        for bucket in buckets:
            self.execute(scratch_plan(bucket)).tokens()
        self._warm = True
        stats = xla_bridge.compile_stats()
        log.info(
            "%d buckets ready in %.1f s: %d programs compiled, %d found in the compile cache, %d unreadable there",
            *(len(buckets), time.perf_counter() - began, stats.num_compiled, stats.num_hits, stats.num_unreadable),
        )

    def execute(self, plan: StepPlan) -> FutureStep:
        if plan.bucket not in self._shapes:
            if self._warm and os.environ.get(REFUSE_LATE):
                raise RuntimeError(f"{plan.bucket} was not compiled in warm-up, and {REFUSE_LATE} is set")
            self._shapes.add(plan.bucket)
            self._num_late_shapes += self._warm
        launched = self._device.submit(self._step, plan)
        return FutureStep(self._results.submit(lambda: _fetched(launched.result())))

    def close(self) -> None:
        self._device.shutdown(wait=True)
        self._results.shutdown(wait=True)
        self._kv.clear()
        self._programs.clear()

    def _on_device(self, work: Callable[..., T], *arguments: object) -> T:
        return self._device.submit(work, *arguments).result()

    @torch.no_grad()
    def _step(self, plan: StepPlan) -> _Launched:
        if plan.bucket not in self._programs:
            self._compiled(plan.bucket)
        layout, program = self._programs[plan.bucket]
        if not self._kv:
            self._kv = self._empty_kv()
        packed = self._devices.put_inputs(torch.from_numpy(layout.packed(plan)))
        last_tokens_L = self._last_tokens_L
        self._kv, results = program([packed, last_tokens_L, *self._kv])
        self._last_tokens_L, logits_SRV, x_TD = results
        if is_greedy(plan):
            return _Launched(self._last_tokens_L, None)
        if plan.processors is not None:
            plan = fed_forward(plan, last_tokens_L.cpu().numpy())
        host_TD = x_TD.cpu() if plan.scoring is not None else x_TD
        _, (logits_RV,) = self._compiled_whole(plan.bucket.rows)([logits_SRV])
        done = choose(plan, logits_RV.cpu(), partial(self._logits_after, host_TD))
        tokens_L = np.zeros(self._model.num_last, np.int32)
        tokens_L[: len(done[0])] = done[0]
        self._last_tokens_L = self._devices.put_inputs(torch.from_numpy(tokens_L))
        return _Launched(self._last_tokens_L, done)

    def _logits_after(self, x_TD: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """logits_NV of these tokens of a step, which is on the host."""
        _, (logits_NV,) = self._compiled_head()([self._devices.put_inputs(x_TD[index_N])])
        return logits_NV.cpu()

    @torch.no_grad()
    def _compiled(self, bucket: Bucket) -> Program:
        layout = Layout(bucket, self._attention(bucket))
        # All new: tracing spends what is donated, and takes what it has seen before for a constant.
        packed = self._devices.put(torch.zeros(sum(layout.sizes), dtype=torch.int32))
        last_tokens_L = self._devices.put(torch.zeros(self._model.num_last, dtype=torch.int32))
        kv = self._empty_kv()
        args = [packed, last_tokens_L, *kv]
        program = Program(step_of(self._model, layout), args, num_donated=len(kv))
        self._programs[bucket] = layout, program
        return program

    def _attention(self, bucket: Bucket) -> AttentionInputs:
        page_size = self._model.page_size
        if self._devices.has_ragged_kernel:
            return RaggedRows(bucket, page_size, self._devices.ragged_attention)
        return Blocks(bucket, page_size)

    @torch.no_grad()
    def _compiled_head(self) -> Program:
        if self._head is None:
            x_ND = self._devices.put(torch.zeros(SCORED_AT_ONCE, self._model.spec.hidden))
            self._devices.wait()
            self._head = Program(head_of(self._model), [x_ND], num_donated=0)
        return self._head

    @torch.no_grad()
    def _compiled_whole(self, num_rows: int) -> Program:
        if num_rows not in self._whole:
            zeros = torch.zeros(self._devices.count, num_rows, self._model.spec.vocab_size)
            logits_SRV = self._devices.put(zeros, divided=0)
            self._devices.wait()
            self._whole[num_rows] = Program(whole_of(self._model), [logits_SRV], num_donated=0)
        return self._whole[num_rows]

    def _empty_kv(self) -> list[torch.Tensor]:
        """kv_ASCH of each layer."""
        made = []
        for i in range(len(self._model.spec.layers)):
            num_slots, num_heads, head_dim = kv_shape(self._model.spec, i, num_slots=self._num_slots)
            zeros = torch.zeros(num_slots, self._devices.count, num_heads, head_dim, dtype=self._dtype)
            made.append(self._devices.put(zeros, divided=1))
            # One layer's at a time is in the host's memory.
            del zeros
            self._devices.wait()
        return made


def _fetched(launched: _Launched) -> StepResult:
    return launched.done or (launched.tokens_L.cpu().numpy(), None)
