"""A machine with TPUs for the torchtpu backend, with the stand-in for torch_tpu (tests/fakes/torch_tpu) in it.

`load_runner` is a factory for processes that have it on their PYTHONPATH (`environment`).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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


def events(log: Path, event: str) -> list[dict[str, object]]:
    """What was asked for, in order of asking."""
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    return [one for one in asked if one["event"] == event]


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
