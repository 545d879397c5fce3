"""A process that does something on XLA's CPU devices and prints what came of it: `python -m tests.xla.child NAME ARG`.
The client and SPMD belong to a process for good, so each test starts one; it does much, because compiling takes long.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch

from ostrya.engine.backends import cpu, xla, xla_bridge
from ostrya.engine.backends.kernels.block_attention import Blocks
from ostrya.engine.backends.kernels.ragged_attention import Ragged
from ostrya.engine.backends.static_ops import TokenInputs
from ostrya.engine.config import AUTO_PAGES, EngineConfig
from ostrya.engine.plan import Bucket, scratch_plan
from ostrya.engine.types import TokenScore
from ostrya.text.source import resolve_model
from tests.numerics.tiny_families import FAMILIES, TinyFamily
from tests.sharded import workload
from tests.unit.engine.backends.test_block_attention import CASES, case

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "numerics" / "golden_smollm2.json"
NUM_REAL, NUM_REAL_NEW = 4, 32
CHOSEN = ("qwen2", "qwen3", "mixtral", "qwen3-moe", "gemma3-large")
"""Biases, norms of queries and keys, experts, windows and norms behind; few, because each takes a minute."""
Json = dict[str, object]
NOTHING: Mapping[str, str] = MappingProxyType({})


def run(
    name: str,
    argument: object = "",
    *,
    num_devices: int = 1,
    timeout_s: float = 600,
    fails: bool = False,
    env: Mapping[str, str] = NOTHING,
) -> Json:
    """What the function printed, or, if it `fails`, the last line of its stderr as "error"."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.xla.child", name, str(argument)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices), **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        check=False,
    )
    if fails:
        assert ended.returncode != 0
        return {"error": ended.stderr.strip().splitlines()[-1]}
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: Json = json.loads(ended.stdout.splitlines()[-1])
    return found


def families(num_devices: str) -> Json:
    """Tiny families, greedy, and one with every kind of row: where their answers differ from the CPU backend's."""
    found: Json = {}
    for name in CHOSEN:
        config = _config(FAMILIES[name], num_devices, max_step_tokens=16)
        reference, model = cpu.load_runner(msgspec.structs.replace(config, backend="cpu", tensor_parallel=1))
        device, _ = xla.load_runner(config)
        for sampled in (False, True) if name == "qwen3" else (False,):
            (expected, expected_scores), (tokens, scores) = (
                workload.answers(runner, config, vocab_size=model.vocab_size, sampled=sampled)
                for runner in (reference, device)
            )
            found[f"{name}{' sampled' * sampled}"] = {
                "differences": workload.differences(tokens, expected),
                "score_error": _largest_error(scores, expected_scores),
                "num_late": device.num_late_shapes,
            }
        reference.close()
        device.close()
    return found


def experts(num_devices: str) -> Json:
    """Mixtral with its experts in two groups, prefill by all-to-all: where answers differ from the CPU backend's."""
    whole = _config(FAMILIES["mixtral"], num_devices, max_step_tokens=16)
    divided = msgspec.structs.replace(whole, expert_parallel=2, expert_exchange_tokens=12)
    reference, model = cpu.load_runner(msgspec.structs.replace(whole, backend="cpu", tensor_parallel=1))
    device, _ = xla.load_runner(divided)
    expected, tokens = (
        workload.answers(runner, divided, vocab_size=model.vocab_size)[0] for runner in (reference, device)
    )
    return {"differences": workload.differences(tokens, expected), "num_late": device.num_late_shapes}


def real_model(num_devices: str) -> Json:
    """SmolLM2: the golden tokens of the shortest prompts."""
    cases = sorted(json.loads(GOLDEN.read_text())["cases"], key=lambda one: len(one["prompt"]))[:NUM_REAL]
    config = workload.real_config(
        str(resolve_model("smollm2-135m-instruct").path),
        backend="xla",
        tensor_parallel=int(num_devices),
        max_running=4,
        max_step_tokens=16,
        num_pages=64,
        max_context_tokens=256,
    )
    runner, _ = xla.load_runner(config)
    tokens = workload.answers_at_once(runner, config, [one["prompt"] for one in cases], num_new=NUM_REAL_NEW)
    expected = {str(number): one["output"][:NUM_REAL_NEW] for number, one in enumerate(cases)}
    return {
        "differences": workload.differences(tokens, expected),
        "num_late": runner.num_late_shapes,
        "num_shapes": runner.num_shapes,
    }


def flat(num_devices: str) -> Json:
    """A thousand steps with a pool of 128 MB: where keys and values lie, how many tensors live, how much memory."""
    config = _config(FAMILIES["qwen3"], num_devices, max_running=4)
    # As many as a limit has room for.
    limited = msgspec.structs.replace(config, num_pages=AUTO_PAGES, memory_limit_bytes=(128 << 20) // int(num_devices))
    runner, _ = xla.load_runner(limited)
    plan = scratch_plan(Bucket(4, 4, 64))
    runner.warm_up([plan.bucket])
    seen = []
    for number in range(1001):
        runner.execute(plan).tokens()
        if number % 500 == 0:
            seen.append((_num_tensors(), _rss_mb(), _addresses(runner, num_devices)))
    (tensors, first_mb, addresses), *_, last = seen
    kv_mb = sum(one.nbytes for one in runner._kv) / 1e6
    num_compiled = xla_bridge.compile_stats().num_compiled
    gc.collect()
    pools = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.shape == runner._kv[0].shape]
    return {
        "kv_mb": kv_mb,
        "counted_mb": int(num_devices) * runner.memory.kv_bytes / 1e6,
        "free_ratio": runner.memory.free_bytes / runner.memory.limit_bytes,
        "num_copies": len(pools) / len(runner._kv),
        "grown_mb": last[1] - first_mb,
        "more_tensors": last[0] - tensors,
        "moved": addresses != last[2],
        "num_compiled": num_compiled,
    }


def late(_: str) -> Json:
    """A bucket that warm-up has not seen: counted; refused where tests ask for that."""
    runner, _model = xla.load_runner(_config(FAMILIES["qwen2"], "1"))
    runner.warm_up([Bucket(4, 4, 64)])
    before = runner.num_late_shapes
    if os.environ.get(xla.REFUSE_LATE):
        runner.execute(scratch_plan(Bucket(8, 8, 64)))
    tokens = runner.execute(scratch_plan(Bucket(8, 8, 64))).tokens()
    return {"before": before, "after": runner.num_late_shapes, "tokens": tokens[:1].tolist()}


def bridge(_: str) -> Json:
    """The entry points, as xla_bridge uses them, on the smallest program."""
    devices = xla_bridge.start(1)
    pool, x = devices.put(torch.zeros(4, 2)), devices.put(torch.ones(2))
    devices.wait()

    def add_row(x: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pool.index_copy_(0, torch.tensor([1], device=pool.device), x[None])
        return (pool.sum(0) + x,)

    before = xla_bridge.compile_stats()
    program = xla_bridge.Program(add_row, [x, pool], num_donated=1)
    kept = devices.put(torch.zeros(4, 2))
    results: list[list[float]] = []
    for value in (2.0, 3.0):
        (kept,), (result,) = program([devices.put_inputs(torch.full((2,), value)), kept])
        results.append(result.cpu().tolist())
    after = xla_bridge.compile_stats()
    return {
        "results": results,
        "pool": kept.cpu().tolist(),
        "num_compiled": after.num_compiled - before.num_compiled,
        "seconds": after.seconds - before.seconds,
    }


def not_in_place(_: str) -> Json:
    devices = xla_bridge.start(1)
    pool = devices.put(torch.zeros(4, 2))
    devices.wait()
    xla_bridge.Program(lambda pool: (pool + 1,), [pool], num_donated=1)
    return {}


def ragged(_: str) -> Json:
    """torch_xla's own reference of its ragged kernel beside ours, on random batches: the largest difference of each."""
    devices = xla_bridge.start(1)
    errors = []
    for number in range(CASES):
        plan, mixer, q_STNH, kv_STCH, kv_ASCH, page_size = case(number)
        parts = map(torch.from_numpy, Blocks(plan.bucket, page_size).packed(plan))
        tokens = TokenInputs(
            positions_T=torch.from_numpy(plan.positions),
            slots_T=torch.from_numpy(plan.slot_mapping).long(),
            page_table_RP=torch.from_numpy(plan.page_table),
        )
        attention = Blocks(plan.bucket, page_size).attention(tokens, list(parts))
        ours_STE, kv_ASCH = attention(q_STNH, kv_STCH, mixer, kv_ASCH)
        batch = Ragged(
            kv_lens_R=devices.put(torch.from_numpy(plan.kv_lens)),
            page_table_RP=devices.put(tokens.page_table_RP),
            query_start=devices.put(torch.from_numpy(plan.query_start)),
            num_rows=devices.put(torch.tensor([plan.num_rows], dtype=torch.int32)),
        )
        theirs_STNH = devices.ragged_attention(
            *(devices.put(q_STNH), devices.put(kv_ASCH), batch),
            page_size=page_size,
            scale=mixer.scale,
            window_tokens=mixer.sizes.window_tokens,
            use_kernel=False,
        )
        num_tokens = plan.num_tokens
        theirs_STE = theirs_STNH.cpu().flatten(-2)[:, :num_tokens]
        errors.append((theirs_STE - ours_STE[:, :num_tokens]).abs().max().item())
    return {"errors": errors}


def load(argument: str) -> Json:
    """Only loads and compiles one bucket."""
    runner, model = xla.load_runner(_config(FAMILIES["qwen2"], argument or "1"))
    runner.warm_up([Bucket(4, 4, 64)])
    tokens = runner.execute(scratch_plan(Bucket(4, 4, 64))).tokens()
    stats = xla_bridge.compile_stats()
    return {"weights": model.weights, "tokens": tokens.tolist(), **stats._asdict()}


def _config(family: TinyFamily, num_devices: str, **changes: object) -> EngineConfig:
    path = family.write(Path(tempfile.mkdtemp()))
    return workload.config(str(path), backend="xla", tensor_parallel=int(num_devices), **changes)


def _largest_error(found: dict[str, list[TokenScore]], expected: dict[str, list[TokenScore]]) -> float:
    pairs = [pair for name in expected for pair in zip(found[name], expected[name], strict=True)]
    return max((abs(one.logprob - other.logprob) for one, other in pairs), default=0.0)


def _num_tensors() -> int:
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


def _rss_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1e3


def _addresses(runner: xla.XlaRunner, num_devices: str) -> list[int]:
    """Of keys and values; over several devices there is no one address."""
    import torch_xla

    return [torch_xla._XLAC._unsafe_buffer_pointer(one) for one in runner._kv] if num_devices == "1" else []


if __name__ == "__main__":
    chosen: dict[str, Callable[[str], Json]] = {
        one.__name__: one for one in (families, experts, real_model, flat, late, bridge, not_in_place, ragged, load)
    }
    print(json.dumps(chosen[sys.argv[1]](sys.argv[2])))
