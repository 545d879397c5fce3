"""A runner that many ranks run as one: rank 0 sends each plan to the others, which replay it, and executes it too.

The engine sees one Runner. What the other ranks do is follower.py; how they are found and watched, leader.py.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ostrya.engine import slice_wire as wire
from ostrya.engine.backends.base import LoadedModel, Runner, StepHandle, factory_of
from ostrya.engine.buckets import Growth
from ostrya.engine.config import EngineConfig
from ostrya.engine.leader import End, Leader
from ostrya.engine.plan import Bucket, Scores, StepPlan
from ostrya.engine.plan_codec import PlanEncoder, chosen
from ostrya.engine.world import ALONE, Slice, ranks_per_host


def load_replica(
    config: EngineConfig, factory: str, slice_: Slice, *, end: End, waiting: Callable[[str], None]
) -> tuple[Runner, LoadedModel]:
    """The runner of a whole replica, all of whose ranks are there and have loaded. ModelLoadError or ConfigError says
    in one line why there is none; from then on `end` ends this process with such a line. `waiting` hears now and then
    who is awaited."""
    load = factory_of(factory)
    if slice_.num_hosts * ranks_per_host(config, slice_.num_hosts) == 1:
        return load(config, ALONE)
    leader = Leader(slice_, config=config, factory=factory, end=end, waiting=waiting)
    world = leader.gather()
    began_s = time.monotonic()
    with leader.blaming():
        runner, model = load(config, world)
    leader.reached("loaded", own_s=time.monotonic() - began_s)
    return Replicated(runner, leader), model


class Replicated:
    """A Runner."""

    def __init__(self, local: Runner, leader: Leader) -> None:
        self._local, self._leader = local, leader
        self._encoder = PlanEncoder()

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    @property
    def num_shapes(self) -> int:
        return self._local.num_shapes

    @property
    def num_late_shapes(self) -> int:
        return self._local.num_late_shapes

    @property
    def growth(self) -> Growth:
        return self._local.growth

    @property
    def num_cached_shapes(self) -> int:
        return self._local.num_cached_shapes

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        began_s = time.monotonic()
        self._leader.tell(wire.WarmUp([(one.tokens, one.rows, one.pages) for one in buckets]))
        with self._leader.blaming():
            self._local.warm_up(buckets)
        self._leader.reached("warm", own_s=time.monotonic() - began_s)

    def execute(self, plan: StepPlan) -> StepHandle:
        step = self._leader.send_plan(self._encoder.encode(plan))
        return _Step(self._local.execute(plan), plan, step, self._leader)

    def close(self) -> None:
        self._leader.close()
        self._local.close()


class _Step:
    """A StepHandle that tells the leader when rank 0 has done its part."""

    def __init__(self, own: StepHandle, plan: StepPlan, step: int, leader: Leader) -> None:
        self._own, self._plan, self._step, self._leader = own, plan, step, leader

    def done(self) -> bool:
        return self._own.done()

    def tokens(self) -> npt.NDArray[np.int32]:
        with self._leader.blaming():
            tokens = self._own.tokens()
        self._leader.done(self._step, chosen(tokens, self._plan))
        return tokens

    def scores(self) -> Scores | None:
        return self._own.scores()
