"""The torchtpu runner, in a process of its own with the stand-in for torch_tpu: launching does not wait, and a program
that is made after warm-up is an error in tests and counted else."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.fakes import tpu
from tests.numerics.tiny_families import FAMILIES


def test_steps_are_launched_at_once_and_late_programs_are_noticed(tmp_path: Path) -> None:
    qwen3 = FAMILIES["qwen3"]
    path = replace(qwen3, config={**qwen3.config, "num_hidden_layers": 1}).write(tmp_path / "m")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.sharded.torchtpu_alone", str(path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **tpu.environment(tmp_path / "log")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    # Nine for steps, three for scores, and of those that came late the one that was not refused.
    assert len(tpu.events(tmp_path / "log", "compile")) == 9 + 3 + 1
