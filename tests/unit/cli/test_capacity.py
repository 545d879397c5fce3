import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ostrya.capacity import estimate
from ostrya.cli.main import app

K3 = ("--model", "kimi-k3")
K3_16 = (*K3, "--slice", "tpu7x-16")
SLO = (*K3, "--slo", "ttft=1s,tpot=50ms", "--rate", "5/s")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["capacity", *words], env={"COLUMNS": "200"})


def document(*words: str) -> dict[str, object]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_a_report_goes_to_stdout_and_nothing_else_does() -> None:
    result = run(*K3_16)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("kimi-k3 on tpu7x-16\n")


def test_options_reach_the_report() -> None:
    words = ("--context", "16,384", "--batch", "4", "--prompt", "1000", "--dtype", "fp8", "--engine", "fused")
    more = ("--kv-dtype", "bf16", "--placement", "tensor-parallel", "--chunk", "4096", "--acceptance", "0.8,0.5")
    found = document(*K3_16, *words, *more)
    assert found["setup"] == {
        "context_tokens": 16384,
        "num_requests": 4,
        "prompt_tokens": 1000,
        "engine": "fused",
        "placement": "tensor-parallel",
        "chunk_tokens": 4096,
        "num_draft_tokens": 2,
        "acceptance_rates": [0.8, 0.5],
        "acceptance_length": None,
    }
    model = found["model"]
    assert isinstance(model, dict)
    assert model["kv_storage"] == "bf16"
    assert {part["storage"] for part in model["parts"] if part["part"] == "attention"} == {"fp8"}


def test_an_acceptance_length_takes_the_place_of_rates() -> None:
    speculation = document(*K3_16, "--speculate", "7", "--acceptance-length", "3.4")["speculation"]
    assert isinstance(speculation, dict)
    assert (speculation["num_draft_tokens"], speculation["acceptance_length"]) == (7, 3.4)


def test_the_defaults_shrink_to_a_model_with_less_context(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"max_position_embeddings": 512}))
    setup = document("--config", str(path), "--slice", "v5e-1")["setup"]
    assert isinstance(setup, dict)
    assert (setup["context_tokens"], setup["prompt_tokens"]) == (511, 512)


def test_an_objective_is_met_by_the_cheapest_slice() -> None:
    prices = ("--price", "v6e=2.7,tpu7x=12")
    asked = (*SLO, "--prompt", "8000", "--output", "500", "--hit-ratio", "0.5", *prices)
    found = document(*asked)
    offers = found["offers"]
    assert isinstance(offers, list)
    assert found["best"] == offers[0]
    assert {offer["generation"] for offer in offers} <= {"v6e", "tpu7x"}
    text = run(*asked).stdout
    assert offers[0]["slice_name"] in text
    assert "per million output tokens" in text


def test_without_prices_it_says_that_chips_decide() -> None:
    assert "no prices given, so the fewest chips win" in run(*SLO).stdout


def test_300_a_minute_is_5_a_second() -> None:
    assert document(*SLO[:-1], "300/min")["best"] == document(*SLO)["best"]


def test_an_objective_nobody_can_meet_ends_with_1_and_says_what_would_help() -> None:
    result = run(*K3, "--slo", "tpot=5ms", "--rate", "5/s")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "tpot of a request alone on" in result.stdout
    assert "over 5.00 ms" in result.stdout
    assert "What would help:\n  - " in result.stdout
    as_json = run(*K3, "--slo", "tpot=5ms", "--rate", "5/s", "--json")
    assert as_json.exit_code == 1
    answer = json.loads(as_json.stdout)
    assert (answer["best"], answer["offers"], answer["goal"]["ttft_s"]) == (None, [], None)
    assert answer["remedies"]


def test_a_search_may_draft() -> None:
    asked = (*K3, "--slo", "tpot=18ms", "--rate", "5/s", "--acceptance", "0.9,0.8,0.7")
    answer = document(*asked)
    assert answer["drafting"] == {"num_draft_tokens": 3, "acceptance_length": pytest.approx(3.4)}
    best = answer["best"]
    assert isinstance(best, dict)
    assert best["tpot_s"] <= 0.018
    assert "3 tokens drafted, acceptance length 3.40" in run(*asked).stdout


def test_options_reach_the_search() -> None:
    asked = (*K3, "--slice", "tpu7x-16", "--slo", "ttft=60s,tpot=1000000us", "--rate", "300/h", "--price", "tpu7x=9")
    usual = document(*asked)
    assert usual["goal"] == {"ttft_s": 60.0, "tpot_s": 1.0}
    assert usual["prices_per_chip_hour"] == {"tpu7x": 9.0}
    # 300 / 3600; 500 tokens of answer unless asked otherwise.
    load = {"requests_per_s": pytest.approx(1 / 12), "prompt_tokens": 8192, "output_tokens": 500, "hit_ratio": 0.0}
    assert usual["load"] == load
    words = ("--prompt", "1,000", "--output", "50", "--hit-ratio", "0.25")
    assert document(*asked, *words)["load"] == load | {"prompt_tokens": 1000, "output_tokens": 50, "hit_ratio": 0.25}
    for option, word in (
        ("--chunk", "512"),
        ("--placement", "tensor-parallel"),
        ("--engine", "fused"),
        ("--dtype", "fp8"),
        ("--kv-dtype", "bf16"),
        ("--hit-ratio", "0.9"),
    ):
        assert document(*asked, option, word)["best"] != usual["best"]


def test_lists_and_comparisons_have_both_forms() -> None:
    assert "qwen3.8-27b" in run("--list").stdout
    assert {"models", "slices"} == document("--list").keys()
    assert "tpu7x-16" in run(*K3, "--compare").stdout
    assert {"model", "setup", "slices"} == document(*K3, "--compare").keys()


def test_a_check_has_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds of search, and the same in both.
    monkeypatch.setattr(estimate, "leave_one_out", functools.cache(estimate.leave_one_out))
    (first,) = (line for line in run("--check").stdout.splitlines() if line.startswith("  Kimi K3, batch 1 "))
    assert len(re.findall(r"[+-]\d+%", first)) == 2
    points = document("--check")["points"]
    assert isinstance(points, list)
    assert {"point", "limit", "estimate", "error_ratio", "unseen_error_ratio"} == points[0].keys()


def test_a_plot_is_written_beside_the_report(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    result = run(*K3_16, "--plot", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert path.read_text().lstrip().startswith("<?xml")
    assert result.stdout.startswith("kimi-k3 on tpu7x-16\n")


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def test_a_config_json_takes_the_place_of_a_ready_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    model = document("--config", str(path), "--slice", "v5e-1")["model"]
    assert isinstance(model, dict)
    assert (model["name"], model["num_layers"]) == ("tiny", 2)


BAD = [
    ((), "no slice is given"),
    (K3, "no slice is given"),
    (("--slice", "v6e-8"), "no model is given"),
    ((*K3, "--slice", "v6e-7"), "slices: v6e-1, v6e-4, v6e-8"),
    ((*K3, "--slice", "h100-8"), "v5e, v5p, v6e, tpu7x"),
    (("--model", "gpt-9", "--slice", "v6e-8"), "models: kimi-k3"),
    ((*K3, "--slice", "tpu7x-4"), "bytes too many; tpu7x-16 would do"),
    ((*K3_16, "--batch", "100000"), "bytes too many; tpu7x-"),
    ((*K3_16, "--batch", "-1"), "--batch is '-1'"),
    ((*K3_16, "--batch", "0"), "--batch is '0'"),
    ((*K3_16, "--batch", "9" * 5000), "--batch is"),
    ((*K3_16, "--batch", "1e3"), "whole number"),
    ((*K3_16, "--batch", "٣"), "whole number"),
    ((*K3_16, "--batch", ""), "whole number"),
    ((*K3_16, "--context", "99999999"), "1,048,576"),
    ((*K3_16, "--prompt", "0"), "--prompt is '0'"),
    ((*K3_16, "--prompt", "2000000"), "1,048,576"),
    ((*K3_16, "--dtype", "fp3"), "mxfp4"),
    ((*K3_16, "--dtype", "bf16"), "narrows nothing"),
    ((*K3_16, "--kv-dtype", "half"), "--kv-dtype"),
    ((*K3_16, "--engine", "warp"), "fused, serving"),
    ((*K3_16, "--placement", "left"), "spread, tensor-parallel"),
    ((*K3_16, "--speculate", "8"), "at most 7"),
    ((*K3_16, "--speculate", "0"), "--speculate is '0'"),
    ((*K3_16, "--speculate", "3", "--acceptance", "0.5"), "only 1 rates"),
    ((*K3_16, "--acceptance", "0.5,1.2"), "'1.2'; it must be a number from 0 to 1"),
    ((*K3_16, "--acceptance", "-0.1"), "0 to 1"),
    ((*K3_16, "--acceptance", "nan"), "0 to 1"),
    ((*K3_16, "--acceptance", "0.5,,0.4"), "0 to 1"),
    ((*K3_16, "--acceptance", "0.5,0.7"), "rises"),
    ((*K3_16, "--acceptance-length", "3"), "--speculate"),
    ((*K3_16, "--speculate", "3", "--acceptance-length", "6"), "1 to 4"),
    ((*K3_16, "--speculate", "3", "--acceptance-length", "0.9"), "at least 1"),
    ((*K3_16, "--acceptance", "0.5", "--acceptance-length", "1.5"), "exclude each other"),
    ((*K3_16, "--config", "x.json"), "--model and --config exclude each other"),
    ((*K3_16, "--rate", "5/s"), "--rate goes with --slo only"),
    ((*K3_16, "--plot", "out.gif"), ".svg or .png"),
    ((*K3_16, "--plot", "/no/such/folder/out.svg"), "its folder must exist"),
    ((*K3_16, "--plot", "/proc/x.svg"), "--plot '/proc/x.svg' cannot be written: "),
    ((*K3, "--compare", "--check"), "exclude each other"),
    ((*K3, "--compare", "--slice", "v6e-8"), "--slice does not go with --compare"),
    (("--check", "--batch", "3"), "--batch does not go with --check"),
    (("--list", *K3), "--model does not go with --list"),
    ((*SLO, "--compare"), "exclude each other"),
    ((*SLO, "--batch", "4"), "--batch does not go with --slo"),
    ((*SLO, "--slice", "v6e-8", "--price", "tpu7x=3"), "--price has none for --slice v6e-8; add v6e="),
    ((*SLO, "--output", "1"), "an output of 1 token is the prompt's last step and has no tpot"),
    ((*SLO, "--rate", "1e-9"), "from 1/h to"),
    ((*K3, "--slo", "tpot=1e-320s", "--rate", "5"), "from 1us to 3600s"),
    ((*K3_16, "--chunk", "0"), "--chunk is '0'; it must be a whole number from 1 to"),
    ((*SLO, "--speculate", "4"), "--speculate with --slo needs --acceptance or --acceptance-length"),
    ((*SLO, "--speculate", "9", "--acceptance-length", "2"), "DSpark drafts at most 7"),
    ((*SLO, "--speculate", "4", "--acceptance-length", "6"), "from 1 to 5"),
    ((*SLO, "--acceptance", "0.5,0.6"), "rises"),
    ((*K3, "--slo", "ttft=1s"), "--rate"),
    ((*K3, "--slo", "ttft=1", "--rate", "5"), "'ttft=1'"),
    ((*K3, "--slo", "latency=1s", "--rate", "5"), "ttft=1s,tpot=20ms"),
    ((*K3, "--slo", "", "--rate", "5"), "ttft=1s,tpot=20ms"),
    ((*K3, "--slo", "ttft=1s,ttft=2s", "--rate", "5"), "twice"),
    ((*K3, "--slo", "tpot=-5ms", "--rate", "5"), "from 1us to 3600s"),
    ((*K3, "--slo", "tpot=1e999s", "--rate", "5"), "ttft=1s,tpot=20ms"),
    ((*K3, "--slo", "tpot=2h", "--rate", "5"), "units s, ms, us"),
    ((*SLO[:-1], "0"), "from 1/h to"),
    ((*SLO[:-1], "five/s"), "5/s, 300/min"),
    ((*SLO[:-1], "1e12/s"), "to 1,000,000/s"),
    ((*SLO, "--hit-ratio", "1.5"), "0 to 1"),
    ((*SLO, "--output", "0"), "--output is '0'"),
    ((*SLO, "--prompt", "1048576", "--output", "2"), "limit is 1,048,576"),
    ((*SLO, "--price", "v9=3"), "v5e, v5p, v6e, tpu7x"),
    ((*SLO, "--price", "v6e=0"), "from 0.001 to"),
    ((*SLO, "--price", "1.2"), "v6e=1.2,tpu7x=5"),
    ((*SLO, "--price", "v6e=1,v6e=2"), "twice"),
    (("--config", "/no/such/config.json", "--slice", "v6e-8"), "not a file"),
    (("--config", "/dev/zero", "--slice", "v6e-8"), "not a file"),
    (("--config", "/", "--slice", "v6e-8"), "not a file"),
]


@pytest.mark.parametrize(("words", "says"), BAD)
def test_bad_input_is_one_line_and_2(words: tuple[str, ...], says: str) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert len(result.stderr) < 1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": "llama", "hidd', "config.json"),
        ("", "config.json"),
        ("[]", "config.json"),
        ('{"hidden_size": 64}', "model_type"),
        ('{"model_type": "zork"}', "'zork'"),
        ('{"model_type": ["llama"]}', "config.json"),
        (json.dumps({key: value for key, value in LLAMA.items() if key != "hidden_size"}), "hidden_size"),
        (json.dumps(LLAMA | {"num_hidden_layers": -1}), "num_hidden_layers"),
        (json.dumps(LLAMA | {"num_hidden_layers": "many"}), "num_hidden_layers"),
        (json.dumps(LLAMA | {"vocab_size": 1e300}), "vocab_size"),
    ],
)
def test_a_config_json_that_cannot_be_used_is_one_line_and_2(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = run("--config", str(path), "--slice", "v5e-1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_a_report_loads_neither_torch_nor_matplotlib_nor_grpc() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from ostrya.cli.main import app; "
        "result = CliRunner().invoke(app, ['capacity', '--model', 'kimi-k3', '--slice', 'tpu7x-16']); "
        "print(result.exit_code, sorted({'torch', 'matplotlib', 'grpc', 'numpy'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "0 []\n"
