"""The XLA backend answers as the CPU backend does, with one device and with four: greedy tokens, every kind of row,
hits, chunks, mixed steps, overlap. No program is built after warm-up."""

from pathlib import Path

import pytest

from tests.xla import child


@pytest.mark.parametrize("num_devices", [1, 4])
def test_families_give_the_tokens_of_the_cpu_backend(num_devices: int, tmp_path: Path) -> None:
    # Of what torch_xla compiles and counts nowhere: to fetch a tensor that lies divided.
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=ReplicateShardedData"
    environment = {"OSTRYA_REFUSE_LATE_SHAPES": "1", "XLA_FLAGS": flags}
    found = child.run("families", num_devices, num_devices=num_devices, env=environment)
    assert not list(tmp_path.iterdir())
    assert len(found) == len(child.CHOSEN) + 1
    for name, one in found.items():
        assert isinstance(one, dict)
        assert (name, one["differences"], one["num_late"]) == (name, [], 0)
        # Sums in another order; log probabilities are of the order of 1 to 10.
        assert one["score_error"] < 1e-3, name


@pytest.mark.parametrize("num_devices", [1, 4])
def test_smollm2_gives_the_golden_tokens(num_devices: int) -> None:
    found = child.run("real_model", num_devices, num_devices=num_devices)
    assert found["differences"] == []
    assert found["num_late"] == 0
    assert found["num_shapes"] == 2, "as many as its ladder has"


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_thousand_steps_keep_one_pool_in_one_place(num_devices: int) -> None:
    found = child.run("flat", num_devices, num_devices=num_devices)
    kv_mb, grown_mb = found["kv_mb"], found["grown_mb"]
    assert isinstance(kv_mb, float)
    assert isinstance(grown_mb, float)
    assert kv_mb > 30
    assert kv_mb == found["counted_mb"]
    assert found["free_ratio"] == pytest.approx(0.1, abs=0.001)
    # A step that did not free one copy of one layer would take a thousand times that.
    assert grown_mb < kv_mb / 2
    assert found["more_tensors"] == 0
    assert found["num_copies"] == 1, "what was traced with is gone"
    assert not found["moved"]
    # The bucket, the head, whole logits, and nothing for a step.
    assert found["num_compiled"] == 3


def test_a_late_bucket_is_counted_and_refused_where_tests_ask_for_that() -> None:
    assert child.run("late") == {"before": 0, "after": 1, "tokens": child.run("load")["tokens"][:1]}  # type: ignore[index]
    refused = child.run("late", fails=True, env={"OSTRYA_REFUSE_LATE_SHAPES": "1"})
    assert "was not compiled in warm-up" in str(refused["error"])
