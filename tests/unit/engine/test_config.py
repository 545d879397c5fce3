"""Engine settings that cannot work are told all at once, without a look at any file."""

import pytest

from ostrya.engine.config import EngineConfig
from ostrya.engine.process import EngineProcess
from ostrya.errors import ConfigError, ModelLoadError


def config(**values: object) -> EngineConfig:
    return EngineConfig(model_path="/nowhere", model_name="m", tokenizer_fingerprint="t", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{}, {"backend": "xla", "tensor_parallel": 8}, {"backend": "torchtpu"}])
def test_what_can_work_is_taken_though_the_model_is_not_there(values: dict[str, object]) -> None:
    config(**values).check()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"weights": "int4", "backend": "xla"},
            "weights is int4; backend xla keeps matrices dense: set auto, bf16 or f32",
        ),
        ({"tensor_parallel": 0, "backend": "xla"}, "tensor_parallel is 0; it must be at least 1"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2; backend cpu has one device: it must be 1"),
    ],
)
def test_tensor_parallel_must_fit_the_backend(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(num_pages=1, **values).check()
    assert refused.value.problems == (words, "num_pages is 1; it must be at least 2")


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_the_time_between_tokens_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"max_inter_token_s is {seconds}; it must be 0 or more"):
        config(max_inter_token_s=seconds).check()


async def test_an_engine_of_a_backend_to_come_is_refused_before_anything_starts() -> None:
    with pytest.raises(ModelLoadError, match="backend torchtpu does not serve in this version; set --backend cpu, xla"):
        await EngineProcess.start(config(backend="torchtpu"))
