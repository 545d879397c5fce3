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
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ostrya.engine.backends import xla_bridge, xla_cache, xla_versions
from ostrya.engine.backends.base import LoadedModel
from ostrya.engine.backends.kernels.block_attention import Blocks
from ostrya.engine.backends.kernels.ragged_attention import RaggedRows
from ostrya.engine.backends.kernels.sampling import sample
from ostrya.engine.backends.kernels.scores import joined, score
from ostrya.engine.backends.static_ops import StaticBuilder, kv_shape
from ostrya.engine.backends.xla_bridge import Devices, Program
from ostrya.engine.backends.xla_step import AttentionInputs, Layout, Model, head_of, step_of, whole_vocabulary
from ostrya.engine.buckets import MIN_ROWS, Growth
from ostrya.engine.config import EngineConfig
from ostrya.engine.models.sharding import Mesh, Sharding
from ostrya.engine.models.source import open_source
from ostrya.engine.models.weights import read_weights
from ostrya.engine.plan import I32, Bucket, Scores, Scoring, StepPlan, fed_forward, scratch_plan
from ostrya.errors import ConfigError, ModelLoadError

T = TypeVar("T")

log = logging.getLogger(__name__)

REFUSE_LATE = "OSTRYA_REFUSE_LATE_SHAPES"
"""Set in tests: what would be compiled after warm-up fails instead of being counted."""
_SCORED_AT_ONCE = 32
"""Prompt tokens whose logits exist at a time."""
_BLOCKS_GROWTH = Growth(rows=4, tokens=8, pages=4)
"""A bucket takes seconds to compile there, and pages that a row does not have take time in every step."""
_KERNEL_GROWTH = Growth(pages=None)

_StepResult = tuple[npt.NDArray[np.int32], Scores | None]


class _Launched(NamedTuple):
    """A step on its way."""

    tokens_L: torch.Tensor
    """On the device."""
    done: _StepResult | None
    """Of a step that the host had to look into."""


def load_runner(config: EngineConfig) -> tuple["XlaRunner", LoadedModel]:
    """Reads the weights onto the devices. ModelLoadError when they or torch_xla cannot be used, ConfigError for what
    cannot be divided so, or for more devices than there are."""
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
    )


@torch.no_grad()
def _loaded(config: EngineConfig, device_thread: ThreadPoolExecutor) -> "XlaRunner":
    # What is wrong with the installation or the model is known before a device is taken.
    if problem := xla_versions.installation_problem():
        raise ModelLoadError(problem)
    source = open_source(Path(config.model_path))
    sharding = Sharding(source.spec, Mesh(tensor=config.tensor_parallel))
    context_tokens = _context_tokens(config, source.spec.context_tokens)
    devices = xla_bridge.start(config.tensor_parallel)
    identity = {
        **xla_versions.versions(),
        **xla_cache.flags(),
        "devices": f"{devices.count} {devices.kind}",
        "model": repr(source.spec),
        "dtype": config.dtype,
        "page_size": str(config.page_size),
    }
    cache = xla_cache.cache_directory(os.environ.get(xla_cache.ROOT_VARIABLE, ""), identity)
    if cache.problem:
        log.warning(cache.problem)
    xla_bridge.open_cache("" if cache.path is None else str(cache.path))
    local = sharding.local
    builder = StaticBuilder(
        shard=None,
        first_token=torch.arange(config.tensor_parallel, dtype=torch.int32)[:, None] * local.vocab_size,
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype],
        placed=lambda tensor: devices.put(tensor, divided=0 if tensor.dim() > 2 else None),
        add_up=partial(torch.sum, dim=0),
    )
    model = Model(
        spec=local,
        weights=read_weights(source, builder, sharding),
        page_size=config.page_size,
        marked=devices.marked,
        num_last=max(MIN_ROWS, 1 << (config.max_running - 1).bit_length()),
    )
    devices.wait()
    return XlaRunner(config, model, devices, device_thread, context_tokens=context_tokens)


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
    ) -> None:
        """On the device thread."""
        self.context_tokens = context_tokens
        self.vocab_size = model.spec.vocab_size * devices.count
        self.growth = _KERNEL_GROWTH if devices.has_ragged_kernel else _BLOCKS_GROWTH
        shared = f" in {devices.count} parts" if devices.count > 1 else ""
        self.weights = f"{config.dtype}, dense, on {devices.kind}{shared}"
        self._model, self._devices = model, devices
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        self._num_slots = config.num_pages * config.page_size
        self._device, self._results = device_thread, ThreadPoolExecutor(1, "results")
        self._programs: dict[Bucket, tuple[Layout, Program]] = {}
        self._head: Program | None = None
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
        for bucket in buckets:
            self.execute(scratch_plan(bucket)).tokens()
        self._warm = True
        stats = xla_bridge.compile_stats()
        log.info(
            "%d buckets ready in %.1f s: %d programs compiled, %d found in the compile cache, %d unreadable there",
            *(len(buckets), time.perf_counter() - began, stats.num_compiled, stats.num_hits, stats.num_unreadable),
        )

    def execute(self, plan: StepPlan) -> "XlaStep":
        if plan.bucket not in self._shapes:
            if self._warm and os.environ.get(REFUSE_LATE):
                raise RuntimeError(f"{plan.bucket} was not compiled in warm-up, and {REFUSE_LATE} is set")
            self._shapes.add(plan.bucket)
            self._num_late_shapes += self._warm
        launched = self._device.submit(self._step, plan)
        return XlaStep(self._results.submit(lambda: _fetched(launched.result())))

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
        if not _needs_host(plan):
            return _Launched(self._last_tokens_L, None)
        if plan.processors is not None:
            plan = fed_forward(plan, last_tokens_L.cpu().numpy())
        done = self._sampled(plan, whole_vocabulary(logits_SRV.cpu()), x_TD)
        tokens_L = np.zeros(self._model.num_last, np.int32)
        tokens_L[: len(done[0])] = done[0]
        self._last_tokens_L = self._devices.put_inputs(torch.from_numpy(tokens_L))
        return _Launched(self._last_tokens_L, done)

    def _sampled(self, plan: StepPlan, logits_RV: torch.Tensor, x_TD: torch.Tensor) -> _StepResult:
        if plan.scoring is None:
            return sample(logits_RV, plan).int().numpy(), None
        logprobs_NV = logits_RV[torch.from_numpy(plan.scoring.row)].log_softmax(-1)
        tokens: npt.NDArray[np.int32] = sample(logits_RV, plan).int().numpy()
        return tokens, self._scores(plan.scoring, x_TD, logprobs_NV, tokens)

    def _scores(self, scoring: Scoring, x_TD: torch.Tensor, logprobs_NV: torch.Tensor, tokens: I32) -> Scores:
        num_top = int(scoring.num_top.max())
        parts = [score(logprobs_NV, torch.from_numpy(tokens[scoring.row]), num_top=num_top)]
        host_TD = x_TD.cpu() if len(scoring.index) else x_TD
        for first in range(0, len(scoring.index), _SCORED_AT_ONCE):
            index_N = torch.from_numpy(scoring.index[first : first + _SCORED_AT_ONCE])
            targets_N = torch.from_numpy(scoring.target[first : first + _SCORED_AT_ONCE])
            x_ND = torch.zeros(_SCORED_AT_ONCE, host_TD.shape[-1])
            x_ND[: len(index_N)] = host_TD[index_N]
            _, (logits_SNV,) = self._compiled_head()([self._devices.put_inputs(x_ND)])
            logprobs_NV = whole_vocabulary(logits_SNV.cpu())[: len(index_N)].log_softmax(-1)
            parts.append(score(logprobs_NV, targets_N, num_top=num_top))
        return joined(parts)

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
            x_ND = self._devices.put(torch.zeros(_SCORED_AT_ONCE, self._model.spec.hidden))
            self._devices.wait()
            self._head = Program(head_of(self._model), [x_ND], num_donated=0)
        return self._head

    def _empty_kv(self) -> list[torch.Tensor]:
        """kv_ASCH of each layer."""
        made = []
        for i in range(len(self._model.spec.layers)):
            num_slots, num_heads, head_dim = kv_shape(self._model.spec, i, num_slots=self._num_slots)
            zeros = torch.zeros(num_slots, self._devices.count, num_heads, head_dim, dtype=self._dtype)
            made.append(self._devices.put(zeros, divided=1))
        self._devices.wait()
        return made


class XlaStep:
    """A StepHandle over the results thread's future."""

    def __init__(self, future: Future[_StepResult]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def tokens(self) -> npt.NDArray[np.int32]:
        return self._future.result()[0]

    def scores(self) -> Scores | None:
        return self._future.result()[1]


def _fetched(launched: _Launched) -> _StepResult:
    return launched.done or (launched.tokens_L.cpu().numpy(), None)


def _needs_host(plan: StepPlan) -> bool:
    """Whether a row wants more than its largest logit."""
    if plan.processors is not None or plan.scoring is not None:
        return True
    return bool(((plan.temperature > 0) & plan.wants_token).any())


def _context_tokens(config: EngineConfig, limit: int) -> int:
    wanted = config.max_context_tokens
    if wanted is not None and not 1 <= wanted <= limit:
        raise ConfigError([f"max_context_tokens is {wanted}; the model allows 1 to {limit}"])
    return wanted or limit
