"""The seam between the engine and what runs the mathematics. The engine knows these protocols and no backend."""

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ostrya.engine.buckets import Growth
from ostrya.engine.config import EngineConfig
from ostrya.engine.plan import Bucket, Scores, StepPlan
from ostrya.engine.types import Memory, Peaks, StepLimit
from ostrya.engine.world import World


class Limit(Protocol):
    """How far from the hardware's limit a model's steps are."""

    @property
    def peaks(self) -> Peaks:
        """What the limit is made of."""

    def limit(self, plan: StepPlan) -> StepLimit:
        """The least time that the step could take; in microseconds, because it is asked of every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine must know of a model that is ready to run."""

    context_tokens: int
    vocab_size: int
    load_s: float
    weights: str
    """How its matrices are kept, and why, for people."""
    load_bytes: int = 0
    """Read from the checkpoint by this process; 0 = not known."""
    memory: Memory | None = None
    """None: not counted."""
    limit: Limit | None = None
    """None: not known."""
    num_pages: int | None = None
    """KV pages that the device has room for; None: as many as the configuration says."""
    is_simulated: bool = False
    """Nothing is computed: the runner waits as long as a step would take."""


class StepHandle(Protocol):
    """A step that was launched. Steps finish in the order of their launch."""

    def done(self) -> bool:
        """True once tokens() does not block."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """[R] the token each row chose; rows that want none hold anything, padding rows may be missing. Blocks; raises
        what the step raised."""

    def scores(self) -> Scores | None:
        """What plan.scoring asked for; None if it asked for nothing. Blocks like tokens()."""


StepResult: TypeAlias = tuple[npt.NDArray[np.int32], Scores | None]
"""Tokens and scores of a step that ended."""


class FutureStep:
    """A StepHandle over a thread's future."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def tokens(self) -> npt.NDArray[np.int32]:
        return self._future.result()[0]

    def scores(self) -> Scores | None:
        return self._future.result()[1]


class Runner(Protocol):
    """A loaded model on a backend, with its KV pages. One owner; execute() is called from one thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def growth(self) -> Growth:
        """Which sizes of buckets it wants."""

    @property
    def num_shapes(self) -> int:
        """Distinct buckets compiled or executed so far."""

    @property
    def num_late_shapes(self) -> int:
        """Buckets first executed after warm_up(): each is a counted fault. Counted before its compile begins, because
        that is how the worker knows that a long step compiles and does not hang."""

    @property
    def num_cached_shapes(self) -> int:
        """How many of num_shapes were found in a compile cache."""

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        """Compiles every bucket; afterwards a new shape is late."""

    def execute(self, plan: StepPlan) -> StepHandle:
        """Launches one step and returns at once, also while the one before runs, whose tokens plan.token_source may
        ask for; steps run in the order of their launch. Returns at once also when it has to compile first: while this
        blocks, the engine is silent, and an engine that is silent for seconds is killed."""

    def close(self) -> None:
        """Waits for launched steps and frees the device."""


RunnerFactory: TypeAlias = Callable[[EngineConfig, World], tuple[Runner, LoadedModel]]
"""Loads this rank's part of the model. ModelLoadError or ConfigError when it cannot be served."""


def factory_of(name: str) -> RunnerFactory:
    """By its "module:function"."""
    module, _, function = name.partition(":")
    factory: RunnerFactory = getattr(importlib.import_module(module), function)
    return factory
