"""One model file, two backends: the CPU's operations in place and plain functional ones give the same tokens, and what
a compiling backend would trace holds nothing that it cannot run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import save_file
from torch.fx.experimental.proxy_tensor import make_fx

from ostrya.capacity.hf_config import read_spec
from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.models.decoder import layer
from ostrya.engine.models.huggingface import HuggingFaceSource
from ostrya.engine.models.source import open_source
from ostrya.engine.models.spec import LayerSpec, RoutedFfn
from tests.numerics.driver import Driver, row_plan
from tests.numerics.reference import ReferenceRunner, empty_kv, static_ops
from tests.numerics.tiny_families import FAMILIES
from tests.unit.engine.models.checkpoints import Tiny, write_directory, write_gguf

TINY = Tiny()
PAGE_SIZE, NUM_PAGES = 4, 64
PROMPTS = [[(7 * row + 3 * at) % 90 + 3 for at in range(length)] for row, length in enumerate((5, 33, 1, 17))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", TINY, TINY.weights())


def test_both_backends_give_the_same_tokens(path: Path) -> None:
    config = EngineConfig(
        model_path=str(path),
        model_name="tiny",
        tokenizer_fingerprint="",
        dtype="float32",
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        num_threads=1,
    )
    cpu, _ = load_runner(config)
    plain = ReferenceRunner(open_source(path), num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    tokens = [
        Driver(runner, page_size=PAGE_SIZE, context_tokens=64).generate(PROMPTS, num_new=8, chunk=16)
        for runner in (cpu, plain)
    ]
    cpu.close()
    assert tokens[0] == tokens[1]
    assert len({token for row in tokens[0] for token in row}) > 8


def test_a_traced_layer_writes_only_keys_and_values_in_place_and_has_no_complex_numbers(path: Path) -> None:
    runner = ReferenceRunner(open_source(path), num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    plan = row_plan(PROMPTS[1], page_size=PAGE_SIZE)
    ops, [kv_ACH, _] = static_ops(plan, page_size=PAGE_SIZE), empty_kv(runner.spec, num_slots=NUM_PAGES * PAGE_SIZE)

    def computed(x_TD: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(ops, runner.spec.layers[0], runner.weights.layers[0], x_TD, kv)

    graph = make_fx(computed)(torch.ones(plan.bucket.tokens, TINY.hidden_size), kv_ACH).graph
    called = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert len(called) > 20
    assert [str(node.target) for node in called if node.target._schema.is_mutable] == ["aten.index_copy_.default"]
    values = [node.meta["val"] for node in called if isinstance(node.meta["val"], torch.Tensor)]
    assert not any(value.is_complex() for value in values)


def test_a_shared_expert_without_a_gate_counts_whole(tmp_path: Path) -> None:
    family = FAMILIES["qwen2-moe"]
    weights = family.weights()
    gates = {name: 0 * values for name, values in weights.items() if name.endswith("shared_expert_gate.weight")}
    without = {name: values for name, values in weights.items() if name not in gates}
    # sigmoid(0) of twice as much.
    twice = {name: 2 * values for name, values in weights.items() if name.endswith("shared_expert.down_proj.weight")}
    sources = []
    for name, stored in {"plain": without, "gated": weights | gates | twice}.items():
        path = family.write(tmp_path / name)
        save_file(stored, path / "model.safetensors")
        sources.append(HuggingFaceSource(path))
    plain = sources[0]
    plain.spec = replace(plain.spec, layers=tuple(_without_gate(layer) for layer in plain.spec.layers))
    logits = [
        ReferenceRunner(source, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        .execute(row_plan(PROMPTS[1], page_size=PAGE_SIZE))
        .logits_RV
        for source in sources
    ]
    torch.testing.assert_close(*logits)


def _without_gate(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.ffn, RoutedFfn)
    return replace(layer, ffn=replace(layer.ffn, sizes=replace(layer.ffn.sizes, shared_gate=False)))


def test_capacity_counts_the_model_that_the_engine_runs(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", TINY, TINY.weights())
    assert open_source(directory).spec.model_spec("m") == read_spec(directory / "config.json")
