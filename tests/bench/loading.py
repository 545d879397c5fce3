"""What a process of a sharded model holds, reads and waits for while it loads: a synthetic checkpoint of some GB over
several processes of backend cpu. Run by `make bench-loading`; tests/integration/test_loading.py runs a small one.

Peak memory is a process's own high-water mark above what it had before (VmHWM), so torch itself does not count. Read
bytes include what lies between two wanted parts of a row, when that is read too (engine/models/reading.py).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ostrya.cli.ports import free_ports
from ostrya.engine.config import AUTO_PAGES, EngineConfig
from ostrya.engine.world import World

GOAL_RATIO, CONSTANT_BYTES = 1.3, 200 << 20
"""The constant: 16 blocks of 8 MiB, and what gloo and oneDNN set aside at their first use."""
_RANDOM = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a Llama in bfloat16."""

    num_layers: int = 32
    hidden: int = 2048
    inner: int = 8192
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab: int = 32_000
    num_files: int = 4

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape, in the order of real files."""
        kv = self.hidden // self.num_heads * self.num_kv_heads
        layer = {
            "input_layernorm": (self.hidden,),
            "mlp.down_proj": (self.hidden, self.inner),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
        }
        layers = {
            f"model.layers.{i}.{name}.weight": shape for i in range(self.num_layers) for name, shape in layer.items()
        }
        table = (self.vocab, self.hidden)
        return {"model.embed_tokens.weight": table} | layers | {"model.norm.weight": table[1:], "lm_head.weight": table}

    @property
    def num_bytes(self) -> int:
        return 2 * sum(map(math.prod, self.shapes().values()))


def write(directory: Path, sizes: Sizes) -> Path:
    """The checkpoint: values repeat, and nothing is held in memory."""
    names = list(sizes.shapes())
    each = -(-len(names) // sizes.num_files)
    weight_map: dict[str, str] = {}
    for number in range(sizes.num_files):
        file = directory / f"model-{number + 1:05}-of-{sizes.num_files:05}.safetensors"
        mine = names[number * each : (number + 1) * each]
        _write_file(file, {name: sizes.shapes()[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file.name)
    config = {
        "model_type": "llama",
        "num_hidden_layers": sizes.num_layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def _write_file(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    values = np.random.default_rng(0).normal(scale=0.02, size=_RANDOM).astype(np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for left in range(end, 0, -len(raw)):
            out.write(raw[:left])


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do."""

    path: str
    rank: int
    num_processes: int
    rendezvous: str
    limit_bytes: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What it says of itself."""

    shard_bytes: int
    """Its part of the checkpoint."""
    read_bytes: int
    peak_bytes: int
    load_s: float
    num_pages: int
    page_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= GOAL_RATIO * self.shard_bytes + CONSTANT_BYTES


def load(directory: Path, num_processes: int, *, limits: Sequence[int] = (), timeout_s: float = 600.0) -> list[Loaded]:
    """Loads it in so many processes at once. With memory limits, as many KV pages as fit, else two."""
    for file in directory.glob("*.safetensors"):
        _forget(file)
    with free_ports() as take:
        rendezvous = f"127.0.0.1:{take(0)}"
    jobs = [
        Job(
            path=str(directory),
            rank=rank,
            num_processes=num_processes,
            rendezvous=rendezvous,
            limit_bytes=limits[rank] if limits else 0,
        )
        for rank in range(num_processes)
    ]
    base = (sys.executable, "-m", "tests.bench.loading", "--job")
    children = [subprocess.Popen((*base, msgspec.json.encode(job).decode()), stdout=subprocess.PIPE) for job in jobs]
    try:
        return [msgspec.json.decode(child.communicate(timeout=timeout_s)[0], type=Loaded) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def _forget(file: Path) -> None:
    """Out of the page cache."""
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def _run(job: Job) -> Loaded:
    from ostrya.engine.backends.cpu import load_runner

    config = EngineConfig(
        model_path=job.path,
        model_name="bench",
        tokenizer_fingerprint="",
        weights="bf16",
        num_pages=AUTO_PAGES if job.limit_bytes else 2,
        memory_limit_bytes=job.limit_bytes or None,
        num_threads=1,
    )
    before = _memory()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")
    runner, model = load_runner(config, World(rank=job.rank, size=job.num_processes, rendezvous=job.rendezvous))
    peak = _memory()["VmHWM"] - before
    runner.close()
    assert model.memory is not None
    return Loaded(
        shard_bytes=model.memory.weights_bytes,
        read_bytes=model.load_bytes,
        peak_bytes=peak,
        load_s=model.load_s,
        num_pages=model.memory.num_pages,
        page_bytes=model.memory.page_bytes,
    )


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Vm")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=Sizes().num_layers)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--job", default="", help="of one of the processes")
    asked = parser.parse_args()
    if asked.job:
        print(msgspec.json.encode(_run(msgspec.json.decode(asked.job, type=Job))).decode())
        return 0
    sizes = Sizes(num_layers=asked.layers)
    with tempfile.TemporaryDirectory(prefix="ostrya-loading-") as directory:
        write(Path(directory), sizes)
        began = time.perf_counter()
        found = load(Path(directory), asked.processes)
        wall_s = time.perf_counter() - began
    print(f"checkpoint {sizes.num_bytes / 1e9:.2f} GB, {asked.processes} processes, {wall_s:.1f} s with their start")
    for rank, one in enumerate(found):
        print(
            f"rank {rank}: shard {one.shard_bytes / 1e9:.2f} GB, read {one.read_bytes / one.shard_bytes:.2f} x, "
            f"peak memory {one.peak_bytes / one.shard_bytes:.2f} x, loaded in {one.load_s:.1f} s "
            f"({one.read_bytes / one.load_s / 1e9:.2f} GB/s)"
        )
    met = all(one.fits for one in found)
    print(f"peak <= {GOAL_RATIO} x shard + {CONSTANT_BYTES >> 20} MiB: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
