"""The only module that touches what torch_xla does not promise: programs traced once and run by their hash, donated
tensors, the compile cache, counters. Used by xla.py; tests/xla/test_bridge.py says at once when an entry point is not
what it was.

torch_xla 2.9.0 is its last release, so what is pinned here moves no more. It is imported by `start`, after it is known
to fit: with another torch it ends in an undefined symbol.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch

from ostrya.engine.backends.kernels.ragged_attention import Ragged
from ostrya.errors import ConfigError, ModelLoadError

AXIS = "tensor"

Traced = Callable[..., tuple[torch.Tensor, ...]]


class CompileStats(NamedTuple):
    """Since the process began."""

    num_compiled: int
    """Programs that were built, not found in the compile cache."""
    seconds: float
    """Building them."""
    num_hits: int
    num_misses: int
    """In the compile cache on disk."""
    num_unreadable: int
    """Found there, and of no use: XLA's CPU device cannot take back what it has written."""


class _Handler(Protocol):
    """torch_xla's SpecialReturnHandler."""

    trace_inputs: Sequence[torch.Tensor]
    trace_outputs: Sequence[torch.Tensor]
    deduped_trace_outputs: Sequence[torch.Tensor]

    def addDumbReturn(self, inputs: Sequence[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]: ...


class _Matcher(Protocol):
    """torch_xla's GraphInputMatcher."""

    arg_idxs: list[int | None]
    graph_input_xla_values: list[torch.Tensor | None]


class _Bridge(Protocol):
    """What is used of the module _XLAC."""

    def _run_cached_graph(self, graph: object, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...


def start(num_devices: int) -> "Devices":
    """Imports torch_xla, which fits (xla_versions.py), and takes the devices, once in a process and before anything
    else does. ModelLoadError if there are none, ConfigError if there are not so many.

    PJRT_DEVICE says of what kind (CPU or TPU); absent, a TPU if there is one. A CPU pretends to have as many as asked.
    """
    wanted_kind = os.environ.get("PJRT_DEVICE", "")
    if wanted_kind in ("", "CPU"):
        os.environ.setdefault("CPU_NUM_DEVICES", str(num_devices))
    runtime = importlib.import_module("torch_xla.runtime")
    try:
        found = int(runtime.global_runtime_device_count())
        kind = str(runtime.device_type())
    except RuntimeError as error:
        raise ModelLoadError(f"PJRT_DEVICE={wanted_kind}: {str(error).splitlines()[0]}") from error
    if num_devices > found:
        raise ConfigError(
            [f"tensor_parallel is {num_devices}; there are {found} {kind} devices here: set it to {found}"]
        )
    if 1 < num_devices < found:
        raise ConfigError(
            [
                f"tensor_parallel is {num_devices}; torch_xla divides among all {found} {kind} devices or takes one: "
                f"set it to {found} or 1"
            ]
        )
    return Devices(num_devices, kind)


class Devices:
    """The devices that share a model, as a mesh of one axis. Made by `start`."""

    def __init__(self, count: int, kind: str) -> None:
        import torch_xla
        import torch_xla.distributed.spmd as spmd
        import torch_xla.runtime as runtime

        self.count, self.kind = count, kind
        self._spmd = spmd
        self._mesh = None
        if count > 1:
            runtime.use_spmd()
            self._mesh = spmd.Mesh(list(range(count)), (count,), (AXIS,))
        self.device = torch_xla.device()

    @property
    def is_tpu(self) -> bool:
        return self.kind == "TPU"

    def put(self, tensor: torch.Tensor, *, divided: int | None = None) -> torch.Tensor:
        """On the devices, divided along that dimension or whole on each."""
        return self.marked(tensor.to(self.device), divided)

    def marked(self, tensor: torch.Tensor, divided: int | None) -> torch.Tensor:
        """The tensor, on the devices already, divided along that dimension or whole on each."""
        if self._mesh is not None:
            spec = tuple(AXIS if dim == divided else None for dim in range(tensor.dim()))
            self._spmd.mark_sharding(tensor, self._mesh, spec)
        return tensor

    def put_inputs(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a program takes in, whole on each: without a mark it is sent with the launch, which costs less."""
        return tensor.to(self.device)

    @property
    def has_ragged_kernel(self) -> bool:
        """Whether `ragged_attention` can be traced here: its kernel is written in jax, for TPU."""
        return self.is_tpu and importlib.util.find_spec("jax") is not None

    def ragged_attention(
        self,
        q_STNH: torch.Tensor,
        kv_ASCH: torch.Tensor,
        batch: Ragged,
        *,
        page_size: int,
        scale: float,
        window_tokens: int | None,
        use_kernel: bool = True,
    ) -> torch.Tensor:
        """A RaggedKernel. The partitioner cannot look into a kernel: each device is given its shard of it by hand."""
        importlib.import_module("torch_xla.experimental.custom_kernel")  # registers the operator
        whole_shape = q_STNH.shape
        q_STNH, kv_ASCH = self._own_shard(q_STNH, 0), self._own_shard(kv_ASCH, 1)
        kv_pages = kv_ASCH.view(kv_ASCH.shape[0] // page_size, page_size, *kv_ASCH.shape[2:])
        parts = (batch.kv_lens_R, batch.page_table_RP, batch.query_start, batch.num_rows)
        out_TNH: torch.Tensor = torch.ops.xla.ragged_paged_attention(
            *(q_STNH[0], kv_pages, *(self._own_shard(part, None) for part in parts)),
            sm_scale=scale,
            sliding_window=window_tokens,
            use_kernel=use_kernel,
        )
        if self._mesh is None:
            return out_TNH[None]
        spec = (AXIS, None, None, None)
        whole = self._spmd.xla_sharding.disable_manual_sharding(out_TNH[None], spec, whole_shape, mesh=self._mesh)
        return cast("torch.Tensor", self._spmd.xla_sharding.unwrap_sharded_tensor(whole))

    def _own_shard(self, tensor: torch.Tensor, divided: int | None) -> torch.Tensor:
        """Of what lies divided along that dimension, or whole on each: a device's own, for operations by hand."""
        if self._mesh is None:
            return tensor
        spec = tuple(AXIS if dim == divided else None for dim in range(tensor.dim()))
        own = self._spmd.xla_sharding.enable_manual_sharding(tensor, spec, mesh=self._mesh)
        return cast("torch.Tensor", self._spmd.xla_sharding.unwrap_sharded_tensor(own))

    def wait(self) -> None:
        """Until everything put is there."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        torch_xla.sync()
        xm.wait_device_ops()


@dataclass(frozen=True, slots=True)
class _Call:
    """What extract_graph_helper wants of a model."""

    fn: Traced
    xla_args: tuple[torch.Tensor, ...]

    def parameters(self) -> list[torch.Tensor]:
        return []

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.fn(*args)


class Program:
    """A function traced and compiled once for one shape. Tensors that it closes over (weights) are part of it."""

    def __init__(self, fn: Traced, args: Sequence[torch.Tensor], *, num_donated: int) -> None:
        """Compiles; runs nothing. The last `num_donated` of `args` are what `fn` writes in place: their memory is given
        to the program in every run, and those given here are spent."""
        import torch_xla
        from torch_xla._dynamo import dynamo_bridge

        donated = args[len(args) - num_donated :]
        for one in donated:
            torch.ops.xla.dynamo_set_buffer_donor_(one, True)
        began = time.perf_counter()
        _, _, self._graph, _, _, matcher, handler, updated = dynamo_bridge.extract_graph_helper(
            _Call(fn, tuple(args)), {}
        )
        self.compile_s = time.perf_counter() - began
        self._num_donated = num_donated
        assert len(updated) == num_donated, f"{len(updated)} of {num_donated} donated tensors are written in place"
        self._handler = cast("_Handler", handler)
        # It keeps what was traced, and with it a pool of keys and values for each program.
        self._handler.trace_inputs = self._handler.trace_outputs = self._handler.deduped_trace_outputs = ()
        self._bridge = cast("_Bridge", torch_xla._XLAC)
        kept = cast("_Matcher", matcher)
        self._constants: list[torch.Tensor | None] = list(kept.graph_input_xla_values)
        """Of each input of the graph; None: an argument."""
        self._places = [(at, arg) for at, arg in enumerate(kept.arg_idxs) if arg is not None]
        missing = set(range(len(args))) - {arg for _, arg in self._places}
        assert not missing, (
            f"arguments {sorted(missing)} are not inputs of the traced graph: constants of it, or unused"
        )

    def __call__(self, args: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Launches it: the donated tensors as they are now, which replace those given, and the results."""
        inputs = list(self._constants)
        for at, arg in self._places:
            inputs[at] = args[arg]
        results = self._bridge._run_cached_graph(self._graph, cast("list[torch.Tensor]", inputs))
        results = self._handler.addDumbReturn(args, results)
        return results[: self._num_donated], results[self._num_donated :]


def open_cache(directory: str) -> None:
    """Programs are kept there, and found there; before the first is compiled, once in a process. Empty: nowhere."""
    bridge = importlib.import_module("torch_xla")._XLAC
    if not bridge._xla_computation_cache_is_initialized():
        importlib.import_module("torch_xla.runtime").initialize_cache(directory)


def compile_stats() -> CompileStats:
    metrics = importlib.import_module("torch_xla.debug.metrics")

    def counted(name: str) -> int:
        return int(metrics.counter_value(name) or 0)

    compile_time = metrics.metric_data("CompileTime")
    return CompileStats(
        num_compiled=counted("UncachedCompile"),
        seconds=float(compile_time[1]) * 1e-9 if compile_time else 0.0,
        num_hits=counted("PersistentCacheHit"),
        num_misses=counted("PersistentCacheMiss"),
        num_unreadable=counted("PersistentCacheDeserializeFailure"),
    )
