"""Starts follower processes on this host: for rank 0 the other ranks of its own host, for another host all of its own.

Such a process lives as long as its parent: the kernel kills it with the thread that started it, which must be the
parent's main thread, and it ends itself when its standard input is closed.
"""

import os
import sys
from collections.abc import Sequence

import msgspec

from ostrya.engine.config import EngineConfig
from ostrya.engine.world import Slice

COMMAND: Sequence[str] = (sys.executable, "-m", "ostrya.engine.follower")


class Follow(msgspec.Struct, frozen=True, kw_only=True):
    """First line of its standard input, in JSON: what to load, and as whom."""

    config: EngineConfig
    factory: str
    """"module:function", as of the engine process."""
    slice_: Slice
    local_rank: int
    parent: int
    """Process id."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of its standard output, in JSON, every so often."""

    phase: str
    """dialling, joined, loading, warming, following; or ended, with the reason."""
    step: int = 0
    detail: str = ""


STATUS_S = 0.5


def first_line(config: EngineConfig, factory: str, slice_: Slice, local_rank: int) -> bytes:
    follow = Follow(config=config, factory=factory, slice_=slice_, local_rank=local_rank, parent=os.getpid())
    return msgspec.json.encode(follow) + b"\n"
