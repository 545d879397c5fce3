"""torch_xla's private entry points are what xla_bridge takes them for. If this fails, torch_xla is not the one that is
pinned, and nothing else here means anything."""

import pytest

from tests.unit.engine.backends.test_block_attention import CASES
from tests.xla import child


def test_a_program_is_traced_once_and_updates_what_is_donated() -> None:
    found = child.run("bridge")
    # pool.sum(0) + x, where the pool has x in one row.
    assert found["results"] == [[4.0, 4.0], [6.0, 6.0]]
    assert found["pool"] == [[0.0, 0.0], [3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
    assert found["num_compiled"] == 1
    assert isinstance(seconds := found["seconds"], float)
    assert seconds > 0


def test_a_donated_tensor_that_is_not_written_in_place_is_a_bug_of_ours() -> None:
    assert "0 of 1 donated tensors are written in place" in str(child.run("not_in_place", fails=True)["error"])


def test_the_ragged_kernel_s_own_reference_equals_our_blocks() -> None:
    errors = child.run("ragged")["errors"]
    assert isinstance(errors, list)
    assert len(errors) == CASES
    # float32 sums in another order.
    assert max(errors) < 1e-5


@pytest.mark.parametrize("name", ["_run_cached_graph", "_get_graph_hash", "_xla_computation_cache_is_initialized"])
def test_entry_points_are_there(name: str) -> None:
    bridge = pytest.importorskip("_XLAC")
    assert hasattr(bridge, name)
