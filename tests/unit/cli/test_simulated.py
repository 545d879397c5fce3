"""What `--backend roofline` takes for a model, and what `ostrya up` refuses before anything is started."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostrya.cli.main import app
from ostrya.cli.simulated import STAND_IN, SimulatedModel, resolve_simulated
from ostrya.cli.stack import Stack, StackOptions
from ostrya.errors import ConfigError, ModelLoadError
from ostrya.text.source import resolve_model
from tests.unit.engine.models.checkpoints import Tiny, write_gguf


def test_a_model_that_only_capacity_knows_has_another_ones_tokenizer() -> None:
    found = resolve_simulated("kimi-k3")
    assert found == SimulatedModel(model="kimi-k3", name="kimi-k3", tokenizer=STAND_IN)
    words = found.notice("tpu7x-16")
    assert words.startswith("simulated: nothing of kimi-k3 is computed")
    assert words.endswith(f"tpu7x-16; its text, spelled by {STAND_IN}'s tokenizer, means nothing")


def test_so_has_a_config_json_alone(tmp_path: Path) -> None:
    directory = tmp_path / "Llama"
    directory.mkdir()
    config = directory / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    expected = SimulatedModel(model=str(config), name="llama", tokenizer=STAND_IN)
    assert resolve_simulated(str(directory)) == resolve_simulated(str(config)) == expected


def test_a_model_with_files_has_its_own_tokenizer(tmp_path: Path) -> None:
    tiny = Tiny()
    path = write_gguf(tmp_path / "Tiny-1.gguf", tiny, tiny.weights())
    found = resolve_simulated(str(path))
    assert found == SimulatedModel(model=str(path), name="tiny-1", tokenizer=str(path))
    assert "tokenizer" not in found.notice("v5e-1")
    packaged = resolve_simulated(STAND_IN)
    assert (packaged.model, packaged.name) == (str(resolve_model(STAND_IN).path), STAND_IN)


def test_what_is_none_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model 'kimi' is not known \(nearest: kimi-k3\); models: kimi-k3, "):
        resolve_simulated("kimi")
    with pytest.raises(ModelLoadError, match=r"has no config.json and no tokenizer.json"):
        resolve_simulated(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--model", "kimi-k3", "--slice", "tpu7x-8"), "bytes too many; tpu7x-16 would do"),
        (("--model", "kimi-k3"), "slice is empty; backend roofline needs the one to simulate"),
        (("--model", "kimi", "--slice", "tpu7x-16"), "model 'kimi' is not known"),
        (("--model", "kimi-k3", "--slice", "tpu7x-16", "--weights", "int4"), "leave --dtype and --weights away"),
        (("--model", "kimi-k3", "--slice", "tpu7x-16", "--tp", "2"), "tp is 2; backend roofline simulates all of"),
    ],
)
def test_up_refuses_before_it_starts_anything(words: tuple[str, ...], refusal: str) -> None:
    ended = CliRunner().invoke(app, ["up", "--backend", "roofline", *words])
    assert ended.exit_code != 0
    assert ended.stderr.startswith("error: ")
    assert refusal in ended.stderr
    assert ended.output.count("\n") == 1


def test_a_slice_without_the_backend_that_simulates_it_is_refused() -> None:
    ended = CliRunner().invoke(app, ["up", "--slice", "tpu7x-16"])
    assert "only --backend roofline simulates one" in ended.stderr


def test_workers_have_the_slice_and_tpu_sizes_and_the_router_the_tokenizer(tmp_path: Path) -> None:
    options = StackOptions(
        num_workers=1,
        model="kimi-k3",
        port=0,
        dtype="bfloat16",
        simulated=resolve_simulated("kimi-k3"),
        slice="tpu7x-16",
        worker_options=("--max-running", "128"),
    )
    stack = Stack(options, tmp_path, print)
    router, worker = (" ".join(stack._commands[name]) for name in ("router", "worker-0"))
    assert f"--model {STAND_IN} --model-name kimi-k3" in router
    assert "--model kimi-k3 --model-name kimi-k3 --backend roofline --slice tpu7x-16 --page-size 64" in worker
    assert worker.endswith(" --max-running 128"), "what is given last wins"
    assert stack.tokens_per_block == 128
