import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ostrya.api.v1 import common_pb2
from ostrya.cli.main import app
from ostrya.cli.report import address
from ostrya.errors import NoReplica, Overloaded
from tests.fakes.router import FakeRouter

Run = Callable[..., Result]


@pytest.fixture
def run(router: FakeRouter) -> Run:
    def run(*words: str, typed: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, list(words), input=typed, env={"OSTRYA_TARGET": router.target, "COLUMNS": "200"})

    return run


def test_generate_streams_the_answer_and_reports_its_cost_on_stderr(run: Run, router: FakeRouter) -> None:
    result = run("generate", "What is ironwood?", "--temperature", "0", "--stop", "tree", "--system", "Be short.")
    assert (result.exit_code, result.stdout) == (0, "Ironwood is hard.\n")
    assert "7 prompt tokens (4 cached), 4 generated, stop" in result.stderr
    assert "decision decision-1" in result.stderr
    request = router.requests[0]
    assert [message.role for message in request.messages] == ["system", "user"]
    assert (request.sampling.temperature, list(request.stop)) == (0.0, ["tree"])
    assert not request.sampling.HasField("top_p")


def test_generate_reads_stdin_and_sends_raw_text(run: Run, router: FakeRouter) -> None:
    assert run("generate", "-", "--raw", "--quiet", typed="Once upon").stdout == "Ironwood is hard.\n"
    assert router.requests[0].text == "Once upon"


def test_generate_takes_every_way_to_choose_tokens(run: Run, router: FakeRouter) -> None:
    words = "--min-p 0.25 --typical-p 0.5 --repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 0.5 "
    words += "--logit-bias 7=-0.5 --logit-bias 8=2 --bad-words no --bad-words never --min-tokens 3 --priority -7"
    assert run("generate", "hi", *words.split()).exit_code == 0
    (sent,) = router.requests
    assert sent.sampling == common_pb2.SamplingParams(
        min_p=0.25,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={7: -0.5, 8: 2},
        min_tokens=3,
    )
    assert (list(sent.bad_words), sent.priority) == (["no", "never"], -7)


def test_generate_asks_for_a_form_from_the_command_line_or_a_file(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    forms = (["--json-schema", f"@{schema}"], ["--regex", "a+"], ["--choice", "yes", "--choice", "no"])
    for form in forms:
        assert run("generate", "hi", *form).exit_code == 0
    assert [request.sampling.structured for request in router.requests] == [
        common_pb2.StructuredOutput(json_schema='{"type": "object"}'),
        common_pb2.StructuredOutput(regex="a+"),
        common_pb2.StructuredOutput(choice=["yes", "no"]),
    ]
    result = run("generate", "hi", "--regex", "a", "--lark", "start: x")
    assert (result.exit_code, result.stderr) == (2, "error: --regex and --lark cannot go together\n")
    result = run("generate", "hi", "--lark", f"@{tmp_path}/none")
    assert result.exit_code == 2
    assert "No such file" in result.stderr


def test_a_bias_that_is_none_is_a_mistake_in_the_command(run: Run, router: FakeRouter) -> None:
    result = run("generate", "hi", "--logit-bias", "7:1")
    assert (result.exit_code, router.requests) == (2, [])
    assert "--logit-bias is '7:1'; allowed: TOKEN_ID=VALUE" in result.stderr


def test_generate_prints_several_answers_one_after_the_other(run: Run) -> None:
    result = run("generate", "hi", "--n", "2", "--logprobs", "1", "--prompt-logprobs", "1")
    assert result.stdout == "[0] Ironwood is hard.\n[1] IRONWOOD IS HARD.\n"
    assert "[1] token 3 -3.0000; likeliest 0 -0.5000" in result.stderr
    assert "prompt, token 2 -100.0000; likeliest 0 -0.5000" in result.stderr
    assert run("generate", "hi", "--logprobs", "0", "--quiet").stdout == "Ironwood is hard.\n"


def test_an_empty_prompt_is_refused_before_it_is_sent(run: Run, router: FakeRouter) -> None:
    assert run("generate", "-", typed="\n").exit_code == 2
    assert router.requests == []


def test_a_wait_for_another_try_is_told_unless_quiet(run: Run, router: FakeRouter) -> None:
    for quiet in ([], ["--quiet"]):
        router.failures = [NoReplica("no replica is routable", retry_after_s=0.01)]
        result = run("generate", "hi", *quiet)
        assert result.exit_code == 0
        assert ("no replica is routable; trying again in 0.0 s\n" in result.stderr) is not bool(quiet)


@pytest.mark.parametrize("words", [["--seed=-1", "hi"], ["--top-k", "99999999999", "hi"], ["hi\udcff"], ["-"]])
def test_what_cannot_be_sent_is_one_line(run: Run, router: FakeRouter, words: list[str]) -> None:
    result = run("generate", *words, typed=b"secret\xff")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "; allowed: " in result.stderr
    assert "secret" not in result.stderr
    assert router.requests == []


@pytest.mark.parametrize("timeout_s", ["0", "-1", "nan"])
def test_a_timeout_that_leaves_no_time_is_a_usage_error(run: Run, router: FakeRouter, timeout_s: str) -> None:
    assert run("generate", "hi", "--timeout-s", timeout_s).exit_code == 2
    assert router.requests == []


def test_an_answer_may_be_begun(run: Run, router: FakeRouter) -> None:
    assert run("generate", "Is it hard?", "--begin-with", "Yes, ").exit_code == 0
    request = router.requests[0]
    said = [(message.role, message.content) for message in request.messages]
    assert said == [("user", "Is it hard?"), ("assistant", "Yes, ")]
    assert request.continue_final_message


@pytest.mark.parametrize("option", ["--system", "--begin-with"])
def test_raw_and_chat_messages_exclude_each_other(run: Run, option: str) -> None:
    result = run("generate", "hi", "--raw", option, "x")
    assert result.exit_code == 2
    assert "--raw" in result.stderr


def test_a_server_error_is_one_line(run: Run, router: FakeRouter) -> None:
    router.failures = [Overloaded("1024 requests are in flight; try again", retry_after_s=60) for _ in range(3)]
    result = run("generate", "hi", "--timeout-s", "5")
    assert result.exit_code == 1
    assert result.stderr == "error: 1024 requests are in flight; try again\n"


def test_an_error_in_the_middle_of_an_answer_stands_on_its_own_line(run: Run, router: FakeRouter) -> None:
    router.fail_after = (2, Overloaded("full"))
    result = run("generate", "hi")
    assert (result.exit_code, result.output) == (1, "Ironwood \nerror: full\n")


def test_nobody_there_says_what_to_do() -> None:
    result = CliRunner().invoke(app, ["workers", "--target", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: 127.0.0.1:1 cannot be reached: Connection refused; start a stack")
    assert "ostrya up" in result.stderr
    assert result.stderr.count("\n") == 1


def test_chat_sends_the_history_with_every_turn(run: Run, router: FakeRouter) -> None:
    result = run("chat", "--system", "Be kind.", typed="one\ntwo\n/reset\nthree\n/exit\n")
    assert result.exit_code == 0
    roles = [[message.role for message in request.messages] for request in router.requests]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert router.requests[1].messages[2].content == "Ironwood is hard."


def test_chat_sends_no_system_message_of_its_own(run: Run, router: FakeRouter) -> None:
    run("chat", typed="one\n/reset\ntwo\n")
    assert [[message.role for message in request.messages] for request in router.requests] == [["user"], ["user"]]


def test_chat_refuses_a_line_that_is_not_utf8_and_goes_on(run: Run, router: FakeRouter) -> None:
    result = run("chat", typed=b"\xff\none\n")
    assert result.exit_code == 0
    assert "error: messages[0].content is not valid UTF-8" in result.stderr
    assert [len(request.messages) for request in router.requests] == [1]


def test_chat_forgets_a_turn_that_failed_and_goes_on(run: Run, router: FakeRouter) -> None:
    router.fail_after = (1, Overloaded("full"))
    result = run("chat", typed="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: full") == 2
    assert len(router.requests[1].messages) == 1


def test_workers_shows_a_row_a_replica(run: Run) -> None:
    result = run("workers")
    assert "routing knowledge: fresh; Redis connected" in result.stdout
    row = next(line for line in result.stdout.splitlines() if "worker-0" in line)
    assert row.split() == ["worker-0", "127.0.0.1:7000", "ready", "1", "1", "0", "2%", "8", "12", "25%"]


def test_workers_as_json_has_every_field(run: Run) -> None:
    answer = json.loads(run("workers", "--json").stdout)
    assert answer["replicas"][0]["load"]["num_waiting"] == 0
    assert answer["replicas"][0]["state"] == "REPLICA_STATE_READY"


def test_explain_says_why_in_plain_words(run: Run) -> None:
    result = run("explain", "decision-1")
    assert "worker-0 was chosen because it holds 64 of the prompt's 80 tokens" in result.stdout
    rows = [line for line in result.stdout.splitlines() if "worker-" in line]
    assert "worker-0 ←" in rows[0]
    assert json.loads(run("explain", "decision-1", "--json").stdout)["reason"] == "prefix"


def test_every_command_that_shows_a_time_says_when_it_is_simulated(run: Run, router: FakeRouter) -> None:
    commands = (("generate", "hi"), ("chat",), ("workers",), ("explain", "decision-1"), ("bench", "--requests", "2"))
    for words in commands:
        router.is_simulated = False
        plain = run(*words, typed="hi\n/exit\n")
        assert "simulated" not in plain.output, words
        router.is_simulated = True
        simulated = run(*words, typed="hi\n/exit\n")
        assert "simulated" in simulated.output, words


def test_an_unknown_decision_is_one_line(run: Run) -> None:
    result = run("explain", "gone")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


def test_bench_reports_percentiles_and_errors_by_kind(run: Run, router: FakeRouter) -> None:
    result = run("bench", "--requests", "12", "--concurrency", "3", "--prefix-tokens", "8", "--json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert (summary["requests"], summary["answered"], summary["errors"]) == (12, 12, {})
    assert summary["generated_tokens"] == 48
    assert summary["cached_ratio"] == pytest.approx(4 / 7, abs=1e-4)
    assert summary["ttft_ms"]["p50"] <= summary["end_to_end_ms"]["p50"]
    assert {len(request.token_ids) for request in router.requests} == {8 + 64}
    assert all(request.sampling.ignore_eos for request in router.requests)


def test_bench_with_nothing_answered_fails(run: Run, router: FakeRouter) -> None:
    router.fail_after = (0, Overloaded("full", retry_after_s=60))
    result = run("bench", "--requests", "2", "--rate", "50", "--timeout-s", "5", "--json")
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert (summary["errors"], summary["first_errors"]) == ({"Overloaded": 2}, {"Overloaded": "full"})
    assert summary["ttft_ms"]["p50"] is None


def test_bench_shows_the_first_error_of_a_kind_and_dashes_for_nothing(run: Run, router: FakeRouter) -> None:
    router.fail_after = (0, Overloaded("[full] of requests", retry_after_s=60))
    result = run("bench", "--requests", "2", "--timeout-s", "5")
    assert "2 Overloaded, the first: [full] of requests\n" in result.stdout
    assert "None" not in result.stdout
    assert next(line for line in result.stdout.splitlines() if "ttft" in line).count(" - ") == 3


def test_bench_takes_prompts_from_a_file(run: Run, router: FakeRouter, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 5}\n')
    assert run("bench", "--requests", "3", "--concurrency", "1", "--prompts", str(file)).exit_code == 0
    assert [request.text for request in router.requests] == ["a", "", "a"]
    assert [request.sampling.max_tokens for request in router.requests] == [32, 5, 32]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": 5}', "text is a value of type int; allowed: valid UTF-8 text"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content is absent; allowed: valid UTF-8 text"),
        (b'{"messages": 5}', "messages is a value of type int; allowed: a list"),
        (b'{"max_tokens": "a", "text": "b"}', "sampling.max_tokens is 'a'; allowed: an integer from 0 to 2147483647"),
        (b'{"max_tokens": 5}', "prompt is given as nothing; allowed: exactly one of text, messages, token_ids"),
        (b'{"text": "a", "token_ids": [1]}', "prompt is given as text and token_ids; allowed: exactly one of"),
        (b'{"token_ids": [-1]}', "token_ids[0] is -1; allowed: an integer from 0 to 4294967295"),
        (b"[]", "prompt is given as nothing"),
        (b"nonsense", "not JSON: Expecting value at column 1"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_bench_says_what_is_wrong_with_a_line_before_it_sends_any(
    run: Run, router: FakeRouter, tmp_path: Path, line: bytes, words: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"text": "a"}\n' + line + b"\n")
    result = run("bench", "--prompts", str(file))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"error: {file}:2: {words}")
    assert router.requests == []


def test_bench_names_the_first_few_of_many_bad_lines(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("nonsense\n" * 100)
    result = run("bench", "--prompts", str(file))
    assert f"{file}:5:" in result.stderr
    assert result.stderr.endswith("; and 95 more lines\n")


def test_bad_settings_are_all_named_at_once() -> None:
    result = CliRunner().invoke(app, ["router", "--max-attempts", "0", "--static-workers", "nowhere"])
    assert result.exit_code == 2
    assert "max_attempts is 0" in result.stderr
    assert "'nowhere' is not host:port" in result.stderr


def test_a_model_that_does_not_exist_is_one_line() -> None:
    result = CliRunner().invoke(app, ["worker", "--worker-id", "w", "--model", "/nowhere/model.gguf"])
    assert result.exit_code == 1
    assert "/nowhere/model.gguf" in result.stderr
    assert result.stderr.count("\n") == 1


def test_up_refuses_a_model_that_does_not_exist_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["up", "--model", "typo"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error: model 'typo' does not exist")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_taken_port_is_one_line(option: str) -> None:
    ports = {"--port": "0", "--metrics-port": "0"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[option] = str(taken.getsockname()[1])
        words = [word for pair in ports.items() for word in pair]
        result = CliRunner().invoke(app, ["router", "--host", "127.0.0.1", *words])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert f"127.0.0.1:{ports[option]}" in result.stderr


@pytest.mark.parametrize("target", ["", "nowhere", "http://127.0.0.1:50051", ":1", "host:0", "host:65536"])
def test_a_target_that_is_no_address_is_one_line(target: str) -> None:
    result = CliRunner().invoke(app, ["generate", "--target", target, "hi"])
    assert result.exit_code == 2
    assert result.stderr == f"error: --target is {target!r}; it must be host:port, like 127.0.0.1:50051\n"


@pytest.mark.parametrize("target", ["localhost:1", "[::1]:50051", "router.svc-1:65535"])
def test_names_and_addresses_are_targets(target: str) -> None:
    assert address(target) == target


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from typer.testing import CliRunner
from ostrya.api.v1 import common_pb2
from ostrya.cli.main import app
from ostrya.cli.report import address
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
heavy = [name for name in ("torch", "grpc", "redis", "tokenizers", "numpy") if name in sys.modules]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("command", sorted(one.name for one in app.registered_commands if one.name))
def test_every_command_explains_itself(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert (result.exit_code, f"ostrya {command}" in result.stdout or f"{command} [OPTIONS]" in result.stdout) == (
        0,
        True,
    )
