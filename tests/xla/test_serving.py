"""The engine process with backend xla: what a worker starts."""

from pathlib import Path

import pytest

from ostrya.engine.process import EngineProcess
from ostrya.engine.types import EngineRequest, RequestId
from tests.numerics.tiny_families import FAMILIES
from tests.sharded import workload


async def test_an_engine_process_serves_on_four_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    config = workload.config(
        str(FAMILIES["qwen2"].write(tmp_path / "model")), backend="xla", tensor_parallel=4, max_step_tokens=8
    )
    engine = await EngineProcess.start(config)
    try:
        assert engine.info.weights == "float32, dense, on CPU in 4 parts"
        request = EngineRequest(request_id=RequestId("1"), token_ids=[5, 6, 7], sampling=workload.GREEDY)
        tokens = [token async for output in engine.submit(request) for token in output.token_ids]
        assert len(tokens) == workload.NUM_NEW
        assert engine.load.num_shapes > 0
        assert engine.load.num_late_shapes == 0
    finally:
        await engine.close()
