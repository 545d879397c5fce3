"""The engine process with backend torchtpu: what is missing is said before torch_tpu is loaded, and an end without a
word is explained. torch_tpu is a stand-in on the path of the engine's process alone."""

from pathlib import Path

import pytest

from ostrya.engine.config import EngineConfig
from ostrya.engine.process import EngineProcess
from ostrya.errors import ModelLoadError
from tests.fakes import tpu
from tests.numerics.tiny_families import FAMILIES

FACTORY = "tests.fakes.tpu:load_runner"


def config(path: Path, *, tensor_parallel: int = 1) -> EngineConfig:
    return EngineConfig(
        model_path=str(path),
        model_name="m",
        tokenizer_fingerprint="",
        backend="torchtpu",
        tensor_parallel=tensor_parallel,
        dtype="float32",
        num_pages=16,
        max_running=4,
        max_step_tokens=16,
    )


async def test_a_machine_without_torch_tpu_is_told_so_and_nothing_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="torch-tpu is not installed, which backend torchtpu needs"):
        await EngineProcess.start(config(tmp_path))


async def test_a_machine_without_a_tpu_is_told_so_and_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    for name, value in tpu.environment(log).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelLoadError, match="this machine shows no TPU"):
        await EngineProcess.start(config(tmp_path))
    assert not log.exists()


async def test_an_engine_that_torch_tpu_ends_says_why_it_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = FAMILIES["qwen3"].write(tmp_path / "m"), tmp_path / "log"
    for name, value in {**tpu.environment(log), "FAKE_TORCH_TPU_DIES": "1"}.items():
        monkeypatch.setenv(name, value)
    # What torch goes by if nobody says otherwise: it would load torch_tpu at once.
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    with pytest.raises(
        ModelLoadError, match=r"ended with code 1 before it was ready; torch_tpu ends its process where"
    ):
        await EngineProcess.start(config(path), factory=FACTORY)
    (imported,) = tpu.events(log, "import")
    assert imported.environment == {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_TPU_INTERNAL_MATERIALIZE_COLLECTIVE_TENSORS": "false",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:8070",
        "TORCH_TPU_TIER2_COMPILATION_CACHE": "ostrya",
        "TORCH_TPU_TOPOLOGY": "1,1,1",
    }
