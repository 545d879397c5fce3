"""Families beyond Llama against `transformers` in float32: small random models of each, as a directory and as a GGUF
file, through both backends.

The closest call in the golden file was 8e-4; summation order moves these logits by about 1e-5.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from ostrya.capacity.hf_config import read_spec
from ostrya.engine.backends.cpu import load_runner
from ostrya.engine.config import EngineConfig
from ostrya.engine.models.source import open_source
from tests.numerics.driver import Driver
from tests.numerics.family_files import write_gguf_family
from tests.numerics.reference import ReferenceRunner
from tests.numerics.tiny_families import FAMILIES, NUM_NEW, PROMPTS, TinyFamily

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


@pytest.mark.parametrize("name", FAMILIES)
def test_a_directory_gives_the_tokens_of_transformers_through_both_backends(name: str, tmp_path: Path) -> None:
    path = FAMILIES[name].write(tmp_path / "m")
    assert generated(path) == expected(name)
    plain = ReferenceRunner(open_source(path), num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    driver = Driver(plain, page_size=PAGE_SIZE, context_tokens=CONTEXT_TOKENS)
    assert driver.generate(PROMPTS, num_new=NUM_NEW, chunk=16) == expected(name)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "mixtral", "qwen2-moe", "qwen3-moe"])
def test_a_gguf_file_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    assert generated(write_gguf_family(tmp_path / "m.gguf", FAMILIES[name]), chunk=24) == expected(name)


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
