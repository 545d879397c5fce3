"""The only module that touches torch_tpu: each name of it that we use stands here, once.

Imported only in the engine's own process, after torchtpu_machine.py found nothing wrong and its environment is set.
Most of torch_tpu's API is marked experimental; tests/unit/engine/backends/test_torchtpu_bridge.py holds these names
against the table of 0.2.0. Here it runs against tests/fakes/torch_tpu.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import metadata
from typing import ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from ostrya.engine.world import World
from ostrya.errors import ModelLoadError

P = ParamSpec("P")
T = TypeVar("T")
_JOIN_LIMIT_S = 300.0


class CacheStats(Protocol):
    """Of all programs that the process asked for."""

    num_compilations: int


def load() -> torch.device:
    """Loads torch_tpu and returns the process's device. ModelLoadError if it has none.

    By its entry point, which is how torch itself does it where TORCH_DEVICE_BACKEND_AUTOLOAD is not 0.
    """
    (entry,) = metadata.entry_points(group="torch.backends", name="torch_tpu")
    entry.load()()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise ModelLoadError("torch_tpu was loaded and shows no device; is another process using the TPU?")
    return device


def join(world: World) -> None:
    """Waits for the other processes; RuntimeError after five minutes."""
    dist.init_process_group(
        "tpu_dist",
        init_method=f"tcp://{world.rendezvous}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=_JOIN_LIMIT_S),
    )


def leave() -> None:
    """The others' next collective fails."""
    dist.destroy_process_group()


def compiled(fn: Callable[P, T], warm_up: Sequence[tuple[object, ...]]) -> Callable[P, T]:
    """`fn` as programs for the shapes of these arguments: traced one after another while others are compiled, and not
    run. Whole graphs with fixed shapes; returns when all are there."""
    from torch_tpu._internal.compile import async_compile
    from torch_tpu._internal.compile._backend import AsyncCompilationSubmitted

    # Dynamo keeps 8 shapes of a function, and fails at the ninth.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * len(warm_up))
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, dynamo.recompile_limit)
    program = cast("Callable[P, T]", async_compile(fn, warm_up))

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return program(*args, **kwargs)
        except AsyncCompilationSubmitted as late:
            # A shape that was not among them: its first call only begins to compile.
            late.resolve()
            return program(*args, **kwargs)

    return run


def num_builds() -> int:
    """Programs compiled so far, by torch_tpu's own count: eager operators are programs too."""
    stats = cast("CacheStats", torch.tpu._get_cache_stats())  # type: ignore[attr-defined]
    return stats.num_compilations


def jax_op(name: str, fn: Callable[P, T], *, donated: Sequence[int]) -> Callable[P, T]:
    """A JAX function as an operator; the arguments donated must not be used again."""
    made = torch.tpu.pallas.jax_op(name, fn, donate_argnums=donated)  # type: ignore[attr-defined]
    return cast("Callable[P, T]", made)
