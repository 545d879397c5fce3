"""Collectives between threads of one process, one a rank."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadCollectives:
    """One rank's view; `together` makes them."""

    def __init__(self, rank: int, parts: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x).sum(0)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self._parts[self.rank] = x
        self._barrier.wait(10)
        gathered = torch.stack([part for part in self._parts if part is not None])
        self._barrier.wait(10)
        return gathered

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x)[:, self.rank]


def together(size: int, work: Callable[[ThreadCollectives], T]) -> list[T]:
    """What `work` gives on each of `size` ranks."""
    barrier, parts = threading.Barrier(size), list[torch.Tensor | None]([None] * size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadCollectives(rank, parts, barrier)), range(size)))


def alone(rank: int, size: int) -> ThreadCollectives:
    """One rank where nothing is exchanged, as while a model is read."""
    return ThreadCollectives(rank, [None] * size, threading.Barrier(size))
