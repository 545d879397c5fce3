"""The entry point."""

import os
import sys
import types
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch._dynamo.backends.registry import register_backend

from torch_tpu._internal.compile import _backend
from torch_tpu._log import log


def load() -> None:
    """What the real one does where there is a TPU; where libtpu cannot be used, it ends the process."""
    if "FAKE_TORCH_TPU_DIES" in os.environ:
        print("libtpu not found.", file=sys.stderr)
        os._exit(1)
    log("load")
    register_backend(_backend.TpuBackend(), name="tpu")
    dist.Backend.register_backend("tpu_dist", _gloo, devices=["cpu"])
    _show_device_once()
    torch.tpu = _tpu()  # type: ignore[attr-defined]


def _show_device_once() -> None:
    """Who asks for the device is told the CPU; Dynamo, which asks later, must find that there is no other."""
    original = torch.accelerator.current_accelerator

    def first(check_available: bool = False) -> torch.device:
        torch.accelerator.current_accelerator = original
        return torch.device("cpu")

    torch.accelerator.current_accelerator = first


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> object:
    log("group", size=size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return ProcessGroupGloo(store, rank, size, timeout)


def _tpu() -> types.ModuleType:
    tpu, pallas = types.ModuleType("torch.tpu"), types.ModuleType("torch.tpu.pallas")
    tpu.__dict__.update(_get_cache_stats=_backend.cache_stats, pallas=pallas)
    pallas.__dict__.update(jax_op=_jax_op)
    return tpu


def _jax_op(name: str, fn: Callable[..., object], /, *, donate_argnums: Sequence[int] | None = None) -> object:
    log("jax_op", name=name, donate_argnums=list(donate_argnums or ()))
    return fn
