"""Families beyond Llama against `transformers` in float32: small random models of each, as a directory and as a GGUF
file, through both backends.

The closest call in the golden file was 8e-4; summation order moves these logits by about 1e-5.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import save_file

from ostrya.capacity.hf_config import read_spec
from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.models.families import BY_KIND
from ostrya.engine.models.source import open_source
from tests.numerics.driver import Driver
from tests.numerics.reference import ReferenceRunner
from tests.numerics.tiny_families import EPS, F32, FAMILIES, NUM_NEW, PROMPTS, TinyFamily

NUM_PAGES, PAGE_SIZE, CONTEXT_TOKENS = 64, 4, 128


class Case(TypedDict):
    output: list[int]
    min_margin: float


GOLDEN = cast(
    "dict[str, list[Case]]", json.loads(Path(__file__).with_name("golden_families.json").read_text())["families"]
)


def expected(name: str) -> list[list[int]]:
    return [case["output"] for case in GOLDEN[name]]


def generated(path: Path, *, prompts: Sequence[Sequence[int]] = PROMPTS, chunk: int = 512) -> list[list[int]]:
    config = EngineConfig(
        model_path=str(path),
        model_name="tiny",
        tokenizer_fingerprint="",
        dtype="float32",
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        num_threads=1,
    )
    runner, _ = load_runner(config)
    try:
        driver = Driver(runner, page_size=PAGE_SIZE, context_tokens=CONTEXT_TOKENS)
        return driver.generate(prompts, num_new=NUM_NEW, chunk=chunk)
    finally:
        runner.close()


def write_gguf(path: Path, family: TinyFamily) -> Path:
    """What llama.cpp's converter makes of the family's directory."""
    kind = str(family.config["model_type"])
    writer = GGUFWriter(path, BY_KIND[kind].gguf_architecture)
    writer.add_block_count(family.size("num_hidden_layers"))
    writer.add_context_length(family.size("max_position_embeddings"))
    writer.add_embedding_length(family.size("hidden_size"))
    writer.add_feed_forward_length(family.size("intermediate_size"))
    writer.add_head_count(family.size("num_attention_heads"))
    writer.add_head_count_kv(family.size("num_key_value_heads"))
    writer.add_key_length(family.size("head_dim"))
    writer.add_value_length(family.size("head_dim"))
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(cast("float", family.config["rope_theta"]))
    for key, add in {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }.items():
        if key in family.config:
            add(family.size(key))
    if family.post_norms:
        writer.add_sliding_window(family.size("sliding_window"))
    stems = {stored: stem for stem, stored in BY_KIND[kind].layer_names.items()}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stacks: dict[str, list[F32]] = {}
    for name, values in family.weights().items():
        stored, suffix = name.rsplit(".", 1)
        if stored in top:
            stem = top[stored]
        else:
            _, _, layer, part = stored.split(".", 3)
            stem = f"blk.{layer}.{stems[re.sub(r'[.][0-9]+[.]', '.{}.', part)]}"
        if stem.endswith("_exps"):
            stacks.setdefault(f"{stem}.{suffix}", []).append(values)
            continue
        if kind == "mixtral" and stem.endswith(("attn_q", "attn_k")):
            # The halves of rotary pairs side by side, as in every file of the architecture "llama".
            values = values.reshape(-1, 2, family.size("head_dim") // 2, values.shape[1]).swapaxes(1, 2)
            values = np.ascontiguousarray(values.reshape(-1, values.shape[-1]))
        is_gemma_norm = family.post_norms and stem.endswith("_norm")
        written = values[0] if stem.endswith("gate_inp_shexp") else values
        writer.add_tensor(f"{stem}.{suffix}", written + np.float32(is_gemma_norm))
    for name, experts in stacks.items():
        writer.add_tensor(name, np.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_directory_gives_the_tokens_of_transformers_through_both_backends(name: str, tmp_path: Path) -> None:
    path = FAMILIES[name].write(tmp_path / "m")
    assert generated(path) == expected(name)
    plain = ReferenceRunner(open_source(path), num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    driver = Driver(plain, page_size=PAGE_SIZE, context_tokens=CONTEXT_TOKENS)
    assert driver.generate(PROMPTS, num_new=NUM_NEW, chunk=16) == expected(name)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "mixtral", "qwen2-moe", "qwen3-moe"])
def test_a_gguf_file_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    assert generated(write_gguf(tmp_path / "m.gguf", FAMILIES[name]), chunk=24) == expected(name)


def test_a_prompt_alone_and_in_small_chunks_sees_the_same_windows(tmp_path: Path) -> None:
    path = FAMILIES["gemma3"].write(tmp_path / "m")
    for prompt, output in zip(PROMPTS, expected("gemma3"), strict=True):
        assert generated(path, prompts=[prompt], chunk=5) == [output]


@pytest.mark.parametrize("name", FAMILIES)
def test_capacity_counts_the_model_that_the_engine_runs(name: str, tmp_path: Path) -> None:
    path = FAMILIES[name].write(tmp_path / "m")
    assert open_source(path).spec.model_spec("m") == read_spec(path / "config.json")


def test_a_gemma_configuration_says_the_same_in_the_form_of_transformers_5(tmp_path: Path) -> None:
    family = FAMILIES["gemma3-large"]
    before = open_source(family.write(tmp_path / "before")).spec
    gone = ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
    window, full = "sliding_attention", "full_attention"
    after = TinyFamily(
        config={
            **{key: value for key, value in family.config.items() if key not in gone},
            "rope_parameters": {
                full: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                window: {"rope_type": "default", "rope_theta": 10_000.0},
            },
            "layer_types": [window, window, full, window, window, full, window],
        },
        qk_norm=True,
        post_norms=True,
    )
    assert open_source(after.write(tmp_path / "after")).spec == before


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_model_beside_a_vision_tower_is_read(prefix: str, tmp_path: Path) -> None:
    family, path = FAMILIES["gemma3"], tmp_path / "m"
    path.mkdir()
    text = {key: value for key, value in family.config.items() if key not in ("architectures", "tie_word_embeddings")}
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    weights = {prefix + name.removeprefix("model."): values for name, values in family.weights().items()}
    towers = ["model.vision_tower.x", "vision_tower.x", "multi_modal_projector.x"]
    vision = dict.fromkeys(towers, np.ones(4, np.float32))
    save_file(weights | vision, path / "model.safetensors")
    assert generated(path, prompts=PROMPTS[:1]) == expected("gemma3")[:1]


def test_no_call_of_these_models_is_close() -> None:
    assert min(case["min_margin"] for cases in GOLDEN.values() for case in cases) > 5e-4
