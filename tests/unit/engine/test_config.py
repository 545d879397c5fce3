"""Engine settings that cannot work are told all at once, without a look at any file."""

import pytest

from ostrya.engine.config import EngineConfig
from ostrya.errors import ConfigError


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
    ],
)
def test_tensor_parallel_must_fit_the_backend(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(num_pages=1, **values).check()
    assert refused.value.problems == (words, "num_pages is 1; it must be at least 2")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"backend": "roofline"}, "slice is empty; backend roofline needs the one to simulate, such as tpu7x-16"),
        ({"slice": "tpu7x-16"}, "slice is tpu7x-16; only backend roofline simulates one"),
        (
            {"backend": "roofline", "slice": "v6e-8", "tensor_parallel": 8},
            "tensor_parallel is 8; backend roofline simulates all of a slice: it must be 1",
        ),
        ({"backend": "roofline", "slice": "tpu7x-3"}, "slice 'tpu7x-3' does not exist in generation tpu7x; slices: "),
    ],
)
def test_a_slice_is_for_the_backend_that_simulates_one(values: dict[str, object], words: str) -> None:
    config(backend="roofline", slice="tpu7x-16").check()
    with pytest.raises(ConfigError, match=words):
        config(**values).check()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"expert_parallel": 3}, "expert_parallel is 3; it must divide tensor_parallel (8)"),
        ({"expert_parallel": 0}, "expert_parallel is 0; it must divide tensor_parallel (8)"),
        ({"expert_exchange_tokens": 0}, "expert_exchange_tokens is 0; it must be at least 1"),
    ],
)
def test_groups_of_experts_are_whole_numbers_of_devices(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(backend="xla", tensor_parallel=8, **values).check()
    assert refused.value.problems == (words,)
    config(backend="xla", tensor_parallel=8, expert_parallel=4, expert_exchange_tokens=64).check()


def test_torchtpu_keeps_matrices_dense() -> None:
    config(backend="torchtpu", weights="bf16").check()
    with pytest.raises(ConfigError, match="weights is int8; backend torchtpu keeps matrices dense"):
        config(backend="torchtpu", weights="int8").check()


@pytest.mark.parametrize("topology", ["2x2x4", "2x4", "1", "2x2x1x2"])
def test_a_slice_has_one_to_four_dimensions(topology: str) -> None:
    config(backend="torchtpu", slice_topology=topology).check()


@pytest.mark.parametrize(
    ("backend", "topology", "words"),
    [
        ("torchtpu", "2,2", "slice_topology is 2,2; it must be numbers of chips like 2x4 or 2x2x4"),
        ("torchtpu", "v6e-8", "slice_topology is v6e-8; it must be numbers of chips like 2x4 or 2x2x4"),
        ("cpu", "2x2", "slice_topology is 2x2; backend cpu does not ask for it: remove it"),
    ],
)
def test_a_slice_that_nobody_can_have_or_wants_is_refused(backend: str, topology: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(backend=backend, slice_topology=topology).check()


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_the_time_between_tokens_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"max_inter_token_s is {seconds}; it must be 0 or more"):
        config(max_inter_token_s=seconds).check()
