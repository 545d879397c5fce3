"""What is simulated: models by name and by file, and as many KV pages as capacity says the slice holds."""

import json
from pathlib import Path

import msgspec
import pytest

from ostrya.capacity.chips import find_slice
from ostrya.capacity.layers import Part
from ostrya.capacity.memory import fit
from ostrya.capacity.models import find_model
from ostrya.capacity.weights import num_params, weight_bytes
from ostrya.engine.backends.roofline_model import MAX_PAGES, simulated, spec_of
from ostrya.engine.config import EngineConfig
from ostrya.errors import ConfigError, ModelLoadError
from tests.unit.engine.models.checkpoints import Tiny, write_directory, write_gguf

CONFIG = EngineConfig(
    model_path="kimi-k3",
    model_name="m",
    tokenizer_fingerprint="",
    backend="roofline",
    slice="tpu7x-16",
    page_size=64,
    max_running=64,
    max_step_tokens=2048,
)


@pytest.mark.parametrize(("model", "slice_"), [("kimi-k3", "tpu7x-16"), ("gpt-oss-120b", "v6e-4")])
def test_pages_are_what_capacity_leaves_beside_all_that_may_run(model: str, slice_: str) -> None:
    spec, where = find_model(model), find_slice(slice_)
    found = simulated(msgspec.structs.replace(CONFIG, model_path=model, slice=slice_))
    tokens_each = (found.num_pages - 1) * CONFIG.page_size // CONFIG.max_running
    context = min(tokens_each, spec.max_context_tokens)
    assert fit(spec, where, context_tokens=context, num_requests=64).fits
    # A little more for each, and it would not: unless no context can be so long.
    more = round(1.01 * tokens_each)
    if more <= spec.max_context_tokens:
        assert not fit(spec, where, context_tokens=more, num_requests=64).fits


def test_the_host_bounds_the_number_of_pages() -> None:
    found = simulated(msgspec.structs.replace(CONFIG, model_path="deepseek-v4-flash", page_size=16))
    assert found.num_pages == MAX_PAGES
    assert found.description.endswith("KV tokens, of which no more are simulated")


def test_a_gguf_files_matrices_have_the_bits_of_the_file(tmp_path: Path) -> None:
    tiny = Tiny()
    path = write_gguf(tmp_path / "tiny.gguf", tiny, tiny.weights())
    spec = spec_of(str(path))
    assert (spec.hidden, spec.vocab_size, spec.max_context_tokens) == (tiny.hidden_size, tiny.vocab_size, 128)
    assert {spec.storage_of(part).bits for part in (Part.ATTENTION, Part.DENSE_FFN, Part.HEAD)} == {32}
    assert weight_bytes(spec) == pytest.approx(4 * num_params(spec), rel=0.02), "norms are taken for 16 bits"


def test_a_config_json_will_do_with_or_without_its_directory(tmp_path: Path) -> None:
    tiny = Tiny()
    write_directory(tmp_path, tiny, tiny.weights())
    assert spec_of(str(tmp_path)).hidden == spec_of(str(tmp_path / "config.json")).hidden == tiny.hidden_size


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model 'kimi-k4' is not known"):
        spec_of("kimi-k4")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        spec_of(str(broken))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "banana"}))
    with pytest.raises(ConfigError, match="'banana', which is not known"):
        spec_of(str(tmp_path))
