"""A machine with TPUs for the torchtpu backend, with the stand-in for torch_tpu (tests/fakes/torch_tpu) in it.

`load_runner` and its neighbour are factories for processes that have it on their PYTHONPATH (`environment`).
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from ostrya.engine.backends import torchtpu, torchtpu_attention
from ostrya.engine.backends import torchtpu_bridge as bridge
from ostrya.engine.backends.base import FutureStep, LoadedModel
from ostrya.engine.backends.torchtpu_machine import this_machine
from ostrya.engine.backends.torchtpu_runner import TorchTpuRunner
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
        self.vocab_size, self.growth, self.num_cached_shapes = runner.vocab_size, runner.growth, 0

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

    def execute(self, plan: StepPlan) -> FutureStep:
        return self._runner.execute(plan)

    def close(self) -> None:
        assert self.num_late_shapes == 0
        self._runner.close()


def write_and_attend(
    kv_ACH: torch.Tensor,
    q_TNH: torch.Tensor,
    kv_TCH: torch.Tensor,
    slots_T: torch.Tensor,
    kv_lens_R: torch.Tensor,
    page_table_RP: torch.Tensor,
    query_start: torch.Tensor,
    num_rows: torch.Tensor,
    page_size: int,
    scale: float,
    window_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What kernels/pallas_attention.py does, in torch."""
    num_tokens, num_heads, _ = q_TNH.shape
    token_T = torch.arange(num_tokens)
    row_T = (token_T[:, None] >= query_start[1:]).sum(-1).minimum(num_rows - 1)
    position_T = kv_lens_R[row_T] - query_start[1:][row_T] + token_T
    side_by_side_TCH = torch.stack(kv_TCH.chunk(2, dim=1), dim=2).flatten(1, 2)
    kv_ACH = kv_ACH.index_copy(0, slots_T.long(), side_by_side_TCH)
    kv_TLCH = kv_ACH.view(-1, page_size, *kv_ACH.shape[1:])[page_table_RP[row_T].long()].flatten(1, 2)
    k_TLNH, v_TLNH = (
        kv_TLCH[:, :, which::2].repeat_interleave(num_heads * 2 // kv_ACH.shape[1], dim=2) for which in (0, 1)
    )
    behind_TL = position_T[:, None] - torch.arange(kv_TLCH.shape[1])
    hidden_TL = (behind_TL < 0) | (behind_TL >= (window_tokens or 1 << 30))
    scores_TNL = torch.einsum("tnh,tlnh->tnl", q_TNH, k_TLNH) * scale
    weights_TNL = scores_TNL.masked_fill(hidden_TL[:, None], -1e30).softmax(-1)
    return torch.einsum("tnl,tlnh->tnh", weights_TNL, v_TLNH), kv_ACH


def load_runner_with_kernel(config: EngineConfig, world: World = ALONE) -> tuple[StrictRunner, LoadedModel]:
    """Its devices attend by a kernel."""
    torchtpu_attention.kernel_for = lambda *_: bridge.jax_op("ostrya::write_and_attend", write_and_attend, donated=[0])
    return load_runner(config, world)


def load_runner(config: EngineConfig, world: World = ALONE) -> tuple[StrictRunner, LoadedModel]:
    """On a machine with four devices."""
    machine = replace(this_machine(), num_devices=4, generation="v6e", topologies={1: "1,1,1", 2: "1,2,1", 4: "2,2,1"})
    runner, model = torchtpu.load_runner(config, world, machine=machine)
    return StrictRunner(runner), model
