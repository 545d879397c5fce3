"""What the processes of a replica do together: add up, and hand each other what each of them has. Called by the
explicit backends; in the annotated one the compiler puts them in.

Gloo over TCP, which is what plain torch has on CPU.
"""

import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ostrya.engine.world import World

_JOIN_LIMIT_S = 300.0
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Collectives(Protocol):
    """Every process calls the same ones in the same order, with tensors of the same shape and dtype."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over processes, the same bits in each; may overwrite x."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...]: that of each process."""
        ...

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Of [size, ...] x[i] goes to process i; [size, ...]: what each process had for this one."""
        ...


class Gloo:
    """Collectives on CPU. One in a process."""

    def __init__(self, world: World) -> None:
        """Waits for the other processes; RuntimeError after five minutes."""
        host, _, port = world.rendezvous.rpartition(":")
        if host in _LOOPBACK:
            # Otherwise gloo looks up the machine's name, which may be an address nobody here can reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.rank, self.size = world.rank, world.size
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=_JOIN_LIMIT_S),
        )

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received

    def close(self) -> None:
        """Leaves; the others' next call fails."""
        dist.destroy_process_group()
