"""Experts divided among four devices by torch_xla: right, and with no more sent than was meant."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.xla import child
from tests.xla.divided_experts import HIDDEN, NUM_DEVICES, NUM_TOKENS


def test_own_experts_over_all_tokens_are_one_sum_and_by_all_to_all_there_is_no_other_gather(tmp_path: Path) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(NUM_DEVICES), "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.xla.divided_experts"]
    run = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, timeout=200
    )
    assert run.returncode == 0
    assert max(json.loads(run.stdout)) < 1e-6
    programs = [_collectives(path.read_text()) for path in sorted(tmp_path.glob("*after_optimizations.txt"))]
    over_all, exchanged = (found for found in programs if found)
    assert over_all == {f"all-reduce {NUM_TOKENS},{HIDDEN}": 1}
    # Tokens, choices and results each go once; then the parts are put together.
    padded = -(-NUM_TOKENS // NUM_DEVICES) * NUM_DEVICES
    assert exchanged.pop(f"all-gather {padded},{HIDDEN}") == 1
    assert [name.split()[0] for name in exchanged.elements()] == ["all-to-all"] * 3


def test_experts_in_groups_and_sent_for_by_all_to_all_give_the_tokens_of_the_cpu_backend() -> None:
    found = child.run("experts", 4, num_devices=4, env={"OSTRYA_REFUSE_LATE_SHAPES": "1"})
    assert found == {"differences": [], "num_late": 0}


def _collectives(program: str) -> Counter[str]:
    """How often each is in a compiled program, with the shape of what it gives."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return Counter(
        f"{kind} {shape}" for shape, kind in re.findall(rf"\[([0-9,]*)\]\S* ({kinds})(?:-start)?\(", program)
    )
