"""What test_torchtpu.py runs in a process with the stand-in for torch_tpu: `python -m ... MODEL`. Ends with 0, or with
the assertion that failed."""

import sys
import threading

import msgspec
import numpy as np
import pytest
import torch

from ostrya.capacity.chips import find_slice
from ostrya.engine.backends.base import LoadedModel
from ostrya.engine.backends.torchtpu_runner import limit_of
from ostrya.engine.buckets import ladder
from ostrya.engine.config import AUTO_PAGES, EngineConfig
from ostrya.engine.plan import Bucket
from tests.fakes.tpu import StrictRunner, load_runner
from tests.numerics.driver import Running, make_plan

PAGE_SIZE = 4
LIMIT_BYTES = 2 << 20
ROW = Running([5, 9, 11], [1])


def main(path: str) -> None:
    config = EngineConfig(
        model_path=path,
        model_name="m",
        tokenizer_fingerprint="",
        backend="torchtpu",
        dtype="float32",
        page_size=PAGE_SIZE,
        num_pages=AUTO_PAGES,
        memory_limit_bytes=LIMIT_BYTES,
        max_running=4,
        max_step_tokens=16,
        max_context_tokens=64,
    )
    runner, model = load_runner(config)
    auto_takes_what_memory_has_room_for(runner, model)
    # Published for one v6e, of bfloat16 alone.
    assert model.limit is None
    limit = limit_of(runner._runner.whole_spec, msgspec.structs.replace(config, dtype="bfloat16"), find_slice("v6e-1"))
    assert limit is not None
    assert limit.limit(make_plan([(ROW, 3)], page_size=PAGE_SIZE, pages_per_row=1)).memory_s > 0
    # Dynamo would keep eight of one function.
    buckets = [Bucket(tokens, 4, pages) for tokens in (4, 8, 16) for pages in (1, 2, 4)]
    assert set(ladder(max_running=4, max_step_tokens=16, page_size=4, context_tokens=64).rows) == {4}
    runner.warm_up(buckets)
    assert (runner.num_shapes, runner.num_late_shapes) == (9, 0)
    launching_does_not_wait(runner)
    a_late_program_is_an_error_in_tests(runner)
    and_else_is_made_and_counted(runner)


def auto_takes_what_memory_has_room_for(runner: StrictRunner, model: LoadedModel) -> None:
    memory, kept = model.memory, runner._runner._kv
    assert memory is not None
    assert model.num_pages == memory.num_pages > 32
    assert sum(layer.nbytes for layer in kept) == memory.kv_bytes
    used = memory.weights_bytes + memory.scratch_bytes + memory.kv_bytes
    assert 0 <= 0.9 * LIMIT_BYTES - used < memory.page_bytes
    # The file has the same in float32, and the table is there to look up and to multiply with.
    assert 0.9 * model.load_bytes < memory.weights_bytes < 2 * model.load_bytes


def launching_does_not_wait(runner: StrictRunner) -> None:
    go = threading.Event()
    runner._runner._device.submit(go.wait)
    plan = make_plan([(ROW, 3)], page_size=PAGE_SIZE, pages_per_row=1)
    handles = [runner.execute(plan), runner.execute(plan)]
    assert [handle.done() for handle in handles] == [False, False]
    go.set()
    first, second = (handle.tokens() for handle in handles)
    assert first.dtype == np.int32
    assert first[0] == second[0] > 0


def a_late_program_is_an_error_in_tests(runner: StrictRunner) -> None:
    late = make_plan([(ROW, 3)], page_size=PAGE_SIZE, pages_per_row=3)
    with pytest.raises(torch._dynamo.exc.RecompileError):
        runner.execute(late).tokens()
    assert runner.num_late_shapes == 1


def and_else_is_made_and_counted(runner: StrictRunner) -> None:
    runner._runner._device.submit(setattr, torch._dynamo.config, "error_on_recompile", False).result()
    known, late = (make_plan([(ROW, 3)], page_size=PAGE_SIZE, pages_per_row=pages) for pages in (2, 5))
    expected = runner.execute(known).tokens()[0]
    handle = runner.execute(late)
    # Before it is made, so that who waits knows that it is being made.
    assert runner.num_late_shapes == 2
    assert handle.tokens()[0] == expected
    # And what the runtime built where no bucket said so.
    torch.tpu._get_cache_stats().num_compilations += 1  # type: ignore[attr-defined]
    runner.execute(known).tokens()
    assert runner.num_late_shapes == 3
    runner._runner.close()


if __name__ == "__main__":
    main(sys.argv[1])
