"""One process's part of a model on its TPU device, through torch_tpu. Called by torchtpu.py, which has prepared the
process; the engine sees only base.py.

One device thread loads and launches, in order. It does not wait for steps whose tokens stay on the device; another
thread fetches them for the host. Every process of a replica executes the same plans in the same order.

Shapes: R rows, v the shard's part of the vocabulary V, D hidden, L the largest row bucket.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ostrya.capacity.chips import Chip, Slice
from ostrya.engine.backends import torchtpu_attention
from ostrya.engine.backends import torchtpu_bridge as bridge
from ostrya.engine.backends.base import FutureStep, LoadedModel, StepResult
from ostrya.engine.backends.exchange import ProcessExchange
from ostrya.engine.backends.host_sampling import SCORED_AT_ONCE, choose, is_greedy
from ostrya.engine.backends.static_ops import StaticBuilder, kv_shape
from ostrya.engine.backends.torchtpu_programs import Kv, Programs, Shards, sizes_of
from ostrya.engine.buckets import Growth, ladder
from ostrya.engine.config import EngineConfig
from ostrya.engine.memory import accounted, require_room, scratch_bytes
from ostrya.engine.models.sharding import Mesh, Sharding
from ostrya.engine.models.source import open_source
from ostrya.engine.models.spec import DecoderSpec
from ostrya.engine.models.weights import read_weights
from ostrya.engine.plan import Bucket, Scores, StepPlan, fed_forward
from ostrya.engine.step_model import StepModel
from ostrya.engine.world import World

T = TypeVar("T")
_Launched = tuple[torch.Tensor, Scores | None]
"""last_tokens_L on the device, and what was asked for beside."""


def load(
    config: EngineConfig, world: World, *, where: Slice | None, chip: Chip | None
) -> tuple["TorchTpuRunner", LoadedModel]:
    """Loads torch_tpu, waits for the other processes, reads the shard's weights. ModelLoadError and ConfigError as
    backends/cpu.py says. `where`: all processes' devices, if their limits are known; `chip`: whose memory there is,
    unless the configuration says."""
    started = time.perf_counter()
    device = ThreadPoolExecutor(1, "device")
    try:
        runner = device.submit(_no_grad, lambda: TorchTpuRunner(config, device, world, chip=chip)).result()
    except BaseException:
        device.shutdown()
        raise
    return runner, LoadedModel(
        context_tokens=runner.context_tokens,
        vocab_size=runner.vocab_size,
        load_s=time.perf_counter() - started,
        weights=f"dense {config.dtype}, a shard of {world.size}" if world.size > 1 else f"dense {config.dtype}",
        load_bytes=runner.load_bytes,
        memory=runner.memory,
        num_pages=runner.memory.num_pages,
        limit=None if where is None else limit_of(runner.whole_spec, config, where),
    )


def limit_of(spec: DecoderSpec, config: EngineConfig, where: Slice) -> StepModel | None:
    """How fast the hardware could do a step; None for float32, which capacity does not count."""
    return StepModel(spec.model_spec(config.model_name), where) if config.dtype == "bfloat16" else None


class TorchTpuRunner:
    """A Runner."""

    num_cached_shapes = 0
    """torch_tpu does not tell the caches of a machine from its own."""

    def __init__(
        self, config: EngineConfig, device: ThreadPoolExecutor, world: World, *, chip: Chip | None = None
    ) -> None:
        """On the device thread."""
        source = open_source(Path(config.model_path))
        self.context_tokens = config.context_within(source.spec.context_tokens)
        self.whole_spec, self.vocab_size = source.spec, source.spec.vocab_size
        sharding = Sharding(source.spec, mesh := Mesh.of(world.size, num_groups=config.expert_parallel))
        limit_bytes = config.memory_limit_bytes or (chip.hbm_bytes // chip.devices_per_chip if chip else None)
        require_room(source.spec, config, mesh, limit_bytes=limit_bytes, chip=chip)
        # Nothing above needs a device: what cannot work is said before one is taken.
        self._on = bridge.load()
        self._world = world
        if world.size > 1:
            bridge.join(world)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        shards = Shards(rank=world.rank, size=world.size)
        self._weights_bytes = 0
        builder = StaticBuilder(
            shard=world.rank,
            first_token=torch.tensor(world.rank * sharding.local.vocab_size),
            dtype=dtype,
            placed=self._placed,
            add_up=shards.add_up,
            expert_group=torch.tensor(world.rank // mesh.tensor),
            exchange=ProcessExchange(shards),
            exchange_tokens=config.expert_exchange_tokens,
        )
        shapes = ladder(
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            page_size=config.page_size,
            context_tokens=self.context_tokens,
        )
        self._programs = Programs(
            spec=sharding.local,
            weights=read_weights(source, builder, sharding),
            shards=shards,
            page_size=config.page_size,
            num_last=shapes.rows[-1],
            kernel=torchtpu_attention.kernel_for(sharding.local, self._on),
        )
        self.load_bytes = source.num_bytes_read
        self.memory = accounted(
            sharding.local,
            config,
            limit_bytes=limit_bytes,
            weights_bytes=self._weights_bytes,
            scratch_bytes=scratch_bytes(sharding.local, config),
            least=lambda num_pages: int(shards.gather(torch.tensor([num_pages]).to(self._on)).min()),
        )
        # The kernel reads no more pages than a row has.
        self.growth = Growth() if self._programs.kernel is None else Growth(pages=None)
        num_slots = self.memory.num_pages * config.page_size
        self._kv: Kv = tuple(
            torch.zeros(kv_shape(sharding.local, i, num_slots=num_slots), dtype=dtype, device=self._on)
            for i in range(len(sharding.local.layers))
        )
        self._last_tokens_L = torch.zeros(self._programs.num_last, dtype=torch.int32, device=self._on)
        self._run, self._whole, self._logits_at = self._programs.step, self._programs.whole, self._programs.logits_at
        self._device = device
        self._fetching = ThreadPoolExecutor(1, "fetch")
        self._shapes: set[Bucket] = set()
        self._num_late_buckets = self._num_late_builds = self._num_builds = 0
        self._is_warm = False

    @property
    def num_shapes(self) -> int:
        return len(self._shapes)

    @property
    def num_late_shapes(self) -> int:
        return self._num_late_buckets + self._num_late_builds

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        """Compiles all programs of all buckets at once, then runs each over scratch page 0: what a first run sets up
        is no request's to pay."""
        self._device.submit(_no_grad, partial(self._warm_up, buckets)).result()
        self._shapes.update(buckets)
        self._is_warm = True

    def execute(self, plan: StepPlan) -> FutureStep:
        is_late = plan.bucket not in self._shapes
        if is_late:
            self._shapes.add(plan.bucket)
            self._num_late_buckets += self._is_warm
        launched = self._device.submit(_no_grad, partial(self._step, plan, is_late=is_late))
        return FutureStep(self._fetching.submit(_fetched, launched))

    def close(self) -> None:
        self._device.shutdown(wait=True)
        self._fetching.shutdown(wait=True)
        self._kv = ()
        if self._world.size > 1:
            bridge.leave()

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        self._weights_bytes += tensor.nbytes
        return tensor.to(self._on)

    def _warm_up(self, buckets: Sequence[Bucket]) -> None:
        programs, last_tokens_L = self._programs, self._last_tokens_L
        tokens, rows = sizes_of(buckets)
        logits_Rv = [torch.zeros(num_rows, programs.spec.vocab_size).to(self._on) for num_rows in rows]
        index_N = torch.zeros(SCORED_AT_ONCE, dtype=torch.int32).to(self._on)
        x_TD = [torch.zeros(num_tokens, programs.spec.hidden).to(self._on) for num_tokens in tokens]
        steps = [programs.step_arguments(bucket, last_tokens_L, self._kv) for bucket in buckets]
        self._run = bridge.compiled(programs.step, steps)
        self._logits_at = bridge.compiled(programs.logits_at, [(x, index_N) for x in x_TD])
        if self._world.size > 1:
            self._whole = bridge.compiled(programs.whole, [(logits,) for logits in logits_Rv])
        for values, _, _, bucket in steps:
            _, _, _, self._kv = self._run(values, last_tokens_L, self._kv, bucket)
        for x in x_TD:
            self._logits_at(x, index_N)
        for logits in logits_Rv:
            self._whole(logits)
        self._num_builds = bridge.num_builds()

    def _step(self, plan: StepPlan, *, is_late: bool) -> _Launched:
        values = torch.from_numpy(self._programs.layout(plan.bucket).packed(plan)).to(self._on)
        last_tokens_L = self._last_tokens_L
        self._last_tokens_L, logits_Rv, x_TD, self._kv = self._run(values, last_tokens_L, self._kv, plan.bucket)
        scores = None
        if not is_greedy(plan):
            tokens_R, scores = self._chosen_here(plan, last_tokens_L, logits_Rv, x_TD)
            tokens_L = torch.zeros(self._programs.num_last, dtype=torch.int32)
            tokens_L[: len(tokens_R)] = torch.from_numpy(tokens_R)
            self._last_tokens_L = tokens_L.to(self._on)
        self._count_builds(is_late=is_late)
        return self._last_tokens_L, scores

    def _chosen_here(
        self, plan: StepPlan, last_tokens_L: torch.Tensor, logits_Rv: torch.Tensor, x_TD: torch.Tensor
    ) -> StepResult:
        """Chosen on the host, by every process alike."""
        if plan.processors is not None:
            plan = fed_forward(plan, last_tokens_L.cpu().numpy())

        def logits_at(index_N: torch.Tensor) -> torch.Tensor:
            return self._logits_at(x_TD, index_N.to(self._on)).cpu()

        return choose(plan, self._whole(logits_Rv).cpu(), logits_at)

    def _count_builds(self, *, is_late: bool) -> None:
        num_builds = bridge.num_builds()
        if self._is_warm and not is_late:
            self._num_late_builds += num_builds - self._num_builds
        self._num_builds = num_builds


def _fetched(launched: Future[_Launched]) -> StepResult:
    tokens_L, scores = launched.result()
    return tokens_L.cpu().numpy(), scores


def _no_grad(work: Callable[[], T]) -> T:
    with torch.no_grad():
        return work()
