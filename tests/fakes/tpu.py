"""A machine with TPUs for the torchtpu backend, with the stand-in for torch_tpu (tests/fakes/torch_tpu) in it.

`load_runner` is a factory for processes that have it on their PYTHONPATH (`environment`).
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from ostrya.engine.backends import torchtpu
from ostrya.engine.backends.base import LoadedModel
from ostrya.engine.backends.torchtpu_machine import this_machine
from ostrya.engine.backends.torchtpu_runner import TorchTpuRunner, TorchTpuStep
from ostrya.engine.config import EngineConfig
from ostrya.engine.plan import Bucket, StepPlan
from ostrya.engine.world import ALONE, World

SITE = Path(__file__).with_name("torch_tpu")


def environment(log: Path) -> dict[str, str]:
    """Of a process that is to have it; what it is asked for goes to `log`."""
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "FAKE_TORCH_TPU_LOG": str(log),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }


class Asked(msgspec.Struct, frozen=True):
    """A line of the log: what the stand-in was asked for, by which rank."""

    event: str
    rank: int = 0
    environment: dict[str, str] = {}
    fn: str = ""
    num_shapes: int = 0
    collectives: dict[str, int] = {}
    """In a program, how many of each."""
    num_written: int = 0
    """Inputs that a program writes to."""
    name: str = ""
    donate_argnums: tuple[int, ...] = ()


def events(log: Path, event: str) -> list[Asked]:
    """In order of asking."""
    asked = [msgspec.json.decode(line, type=Asked) for line in log.read_text().splitlines()]
    return [one for one in asked if one.event == event]


class StrictRunner:
    """The runner of a process where a program that is made after warm-up is an error."""

    def __init__(self, runner: TorchTpuRunner) -> None:
        self._runner = runner
        self.vocab_size = runner.vocab_size

    @property
    def num_shapes(self) -> int:
        return self._runner.num_shapes

    @property
    def num_late_shapes(self) -> int:
        return self._runner.num_late_shapes

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        self._runner.warm_up(buckets)
        # Where programs are made, because torch's settings may belong to a thread.
        self._runner._device.submit(setattr, torch._dynamo.config, "error_on_recompile", True).result()

    def execute(self, plan: StepPlan) -> TorchTpuStep:
        return self._runner.execute(plan)

    def close(self) -> None:
        assert self.num_late_shapes == 0
        self._runner.close()


def load_runner(config: EngineConfig, world: World = ALONE) -> tuple[StrictRunner, LoadedModel]:
    """On a machine with four devices."""
    machine = replace(this_machine(), num_devices=4, topologies={1: "1,1,1", 2: "1,2,1", 4: "2,2,1"})
    runner, model = torchtpu.load_runner(config, world, machine=machine)
    return StrictRunner(runner), model
