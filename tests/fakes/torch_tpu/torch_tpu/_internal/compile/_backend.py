"""The backend "tpu" of torch.compile: the graph as it came, on CPU, once it was looked at."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from torch_tpu._log import log

Run = Callable[..., object]


@dataclass(slots=True)
class CacheStats:
    """As far as it is asked for."""

    num_compilations: int = 0


_STATS = CacheStats()
_latest = [""]
"""The function that was to be compiled last."""


def cache_stats() -> CacheStats:
    """Of the process so far."""
    return _STATS


class AsyncCompilationSubmitted(Exception):
    """The first call of a program that is compiled beside: it was not run."""

    def resolve(self) -> None:
        """Waits until it is compiled."""


class TpuBackend:
    """Called by Dynamo for each graph."""

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[object], options: Mapping[str, object] | None = None
    ) -> Run:
        if not torch._dynamo.config.assume_static_by_default:
            raise NotImplementedError("TPU backend does not support torch.compile(..., dynamic=True, ...)")
        run: Run = aot_autograd(fw_compiler=_compile, keep_inference_input_mutations=False)(graph, inputs)
        is_new = bool((options or {}).get("async_compile"))

        def run_unless_new(*args: object) -> object:
            nonlocal is_new
            if is_new:
                is_new = False
                raise AsyncCompilationSubmitted
            return run(*args)

        return run_unless_new


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Run:
    _STATS.num_compilations += 1
    tracing = TracingContext.get()
    written = tracing.fw_metadata.mutated_inp_runtime_indices if tracing.fw_metadata else []
    ops = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    log(
        "compile",
        fn=_latest[0],
        collectives={name.split(".")[1]: count for name, count in ops.items() if name.startswith("_c10d_functional.")},
        num_ops=ops.total(),
        num_written=len(written),
    )
    made: Run = make_boxed_func(graph.forward)
    return made


def async_compile(
    fn: Run, warmup_inputs: Sequence[object], *, no_grad: bool = True, **options: str | int | bool
) -> Run:
    """Traces and compiles for each of these arguments; runs nothing."""
    _latest[0] = fn.__name__
    log("async_compile", fn=fn.__name__, num_shapes=len(warmup_inputs))
    compiled: Run = torch.compile(
        fn, backend="tpu", fullgraph=True, dynamic=False, options={"async_compile": True, **options}
    )
    if no_grad:
        compiled = torch.no_grad()(compiled)
    for args in warmup_inputs:
        assert isinstance(args, tuple), "anything else is one argument"
        try:
            compiled(*args)
        except AsyncCompilationSubmitted as submitted:
            submitted.resolve()
    return compiled
