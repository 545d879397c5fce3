"""`ostrya worker` before it serves: its configuration, and a stop that comes early."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostrya.cli.main import app
from ostrya.cli.termination import ends_on_sigterm
from ostrya.engine.config import EngineConfig
from ostrya.text.tokenizer import load_tokenizer
from ostrya.worker.settings import WorkerSettings
from tests.unit.text.files import write_gguf


def check(*words: str) -> tuple[int, str]:
    """Exit code and what was said."""
    command = ["worker", "--worker-id", "w", "--check-config", *words]
    ended = CliRunner().invoke(app, command, env={name: None for name in os.environ if name.startswith("OSTRYA_")})
    return ended.exit_code, ended.output


def test_a_configuration_is_valid_though_neither_model_nor_cluster_is_there() -> None:
    tpu = ("--backend", "xla", "--tensor-parallel", "8", "--model", "/models/llama", "--start-report-dir", "/reports")
    redis = ("--redis-url", "rediss://u:p@redis:6379/0?ssl_ca_certs=/tls/ca.crt", "--metric-aliases")
    assert check(*tpu, *redis) == (0, "configuration is valid\n")


def test_every_problem_is_told_at_once() -> None:
    code, said = check(
        *("--tensor-parallel", "3", "--model", "gs://bucket/m", "--redis-url", "http://:hunter2@h"),
        *("--page-size", "3", "--hosts", "2", "--host-index", "0", "--leader-address", "h"),
    )
    assert code == 2
    assert said.count("error: ") == 4
    assert all(
        word in said
        for word in (
            "page_size is 3",
            "fetch it first: ostrya fetch gs://bucket/m",
            "redis_url",
            "tensor_parallel is 3; it must be a multiple of the number of hosts, 2",
        )
    )
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "words", [("--backend", "gpu"), ("--dtype", "int8"), ("--num-pages", "many"), ("--no-such", "1")]
)
def test_what_no_option_takes_is_refused(words: tuple[str, ...]) -> None:
    assert check(*words)[0] == 2


def test_sigterm_ends_it_before_there_is_a_server() -> None:
    """The reading of the tokenizer is held up here; a container's first process would ignore the signal."""
    code = """
import time
import ostrya.text.tokenizer as tokenizer
def load_tokenizer(path):
    print("reading", flush=True)
    while True:
        time.sleep(0.01)  # a signal just before one long sleep would be heard after it
tokenizer.load_tokenizer = load_tokenizer
from ostrya.cli.main import app
app(["worker", "--worker-id", "w"])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reading\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(10) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_the_engine_is_told_what_ends_a_turn_and_what_tokens_spell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[EngineConfig] = []
    spelled: list[bytes] = []

    async def serve(settings: WorkerSettings, config: EngineConfig, *, vocabulary: Callable[[], list[bytes]]) -> int:
        served.append(config)
        spelled.extend(vocabulary())
        return 0

    monkeypatch.setattr("ostrya.worker.app.serve", serve)
    ids = {"eos": "<|endoftext|>"}
    path = write_gguf(tmp_path / "m.gguf", control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ids=ids)
    result = CliRunner().invoke(app, ["worker", "--worker-id", "w", "--model", str(path)])
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer(path)
    assert served[0].eos_token_ids == tokenizer.eos_token_ids == (39, 41)
    assert served[0].tokenizer_fingerprint == tokenizer.fingerprint
    assert spelled == tokenizer.vocabulary()


def test_the_handler_of_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ends_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
