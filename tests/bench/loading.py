"""What a process of a sharded model holds, reads and waits for while it loads: a synthetic checkpoint of some GB over
several processes of backend cpu. Run by `make bench-loading`; tests/integration/test_loading.py runs a small one.

Peak memory is a process's own high-water mark above what it had before (VmHWM), so torch itself does not count. Read
bytes include what lies between two wanted parts of a row, when that is read too (engine/models/reading.py).
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What one process says of itself."""

    shard_bytes: int
    """Its part of the checkpoint."""
    read_bytes: int
    peak_bytes: int
    load_s: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= GOAL_RATIO * self.shard_bytes + CONSTANT_BYTES


def load(directory: Path, num_processes: int, *, timeout_s: float = 600.0) -> list[Loaded]:
    """Loads it in so many processes at once."""
    for file in directory.glob("*.safetensors"):
        _forget(file)
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    base = (sys.executable, "-m", "tests.bench.loading", "--model", str(directory), "--rendezvous", rendezvous)
    children = [
        subprocess.Popen((*base, "--rank", str(rank), "--processes", str(num_processes)), stdout=subprocess.PIPE)
        for rank in range(num_processes)
    ]
    try:
        return [Loaded(**json.loads(child.communicate(timeout=timeout_s)[0])) for child in children]
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


def _child(model: str, rank: int, num_processes: int, rendezvous: str) -> Loaded:
    from ostrya.engine.backends.cpu import load_runner
    from ostrya.engine.config import EngineConfig
    from ostrya.engine.models.sharding import Mesh, Sharding
    from ostrya.engine.models.source import open_source
    from ostrya.engine.world import World

    config = EngineConfig(
        model_path=model, model_name="bench", tokenizer_fingerprint="", weights="bf16", num_pages=2, num_threads=1
    )
    spec = Sharding(open_source(Path(model)).spec, Mesh(tensor=num_processes)).local
    from ostrya.capacity.weights import weight_bytes

    before = _memory()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")
    runner, loaded = load_runner(config, World(rank=rank, size=num_processes, rendezvous=rendezvous))
    peak = _memory()["VmHWM"] - before
    runner.close()
    return Loaded(
        shard_bytes=round(weight_bytes(spec.model_spec("bench"))),
        read_bytes=loaded.load_bytes,
        peak_bytes=peak,
        load_s=loaded.load_s,
    )


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Vm")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=Sizes().num_layers)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--model", default="")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--rendezvous", default="")
    asked = parser.parse_args()
    if asked.rank >= 0:
        loaded = _child(asked.model, asked.rank, asked.processes, asked.rendezvous)
        print(json.dumps({name: getattr(loaded, name) for name in Loaded.__dataclass_fields__}))
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
