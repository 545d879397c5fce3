"""`--check-config`: what the command would not accept, a line each, and nothing is started."""

import pytest
from typer.testing import CliRunner, Result

from ostrya.cli.main import app


def check(*words: str, service: str = "router", **environment: str) -> Result:
    # What the tests' own environment holds is no part of a pod's.
    own = {"OSTRYA_REQUIRE_ALL": None, "OSTRYA_STACK": None}
    return CliRunner().invoke(app, [service, "--check-config", *words], env={**own, **environment})


def test_a_valid_configuration_is_one_line_and_0() -> None:
    environment = {"OSTRYA_POOL": "blue", "OSTRYA_STATIC_WORKERS": "a:1 b:2", "HOME": "/"}
    result = check("--port", "1", "--model", "/nowhere/at/all.gguf", **environment)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "configuration is valid\n", "")


def test_every_problem_of_the_settings_is_a_line_and_2() -> None:
    result = check("--max-attempts", "0", "--static-workers", "nowhere", "--model", "gs://bucket/model")
    assert (result.exit_code, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)
    assert "max_attempts is 0" in lines[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--port", "99999"), "port is 99999"),
        (("--port", "-1"), "port is -1"),
        (("--metrics-port", "70000"), "metrics_port is 70000"),
        (("--host", ""), "host is ''"),
        (("--otlp-endpoint", "h:99999"), "otlp_endpoint is 'h:99999'"),
        (("--static-workers", "h:99999"), "static worker 'h:99999'"),
        (("--drain-timeout-s", "inf"), "drain_timeout_s is inf"),
    ],
)
def test_what_would_not_work_is_told(words: tuple[str, str], says: str) -> None:
    result = check(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {says}")


def test_a_variable_that_no_option_reads_is_refused() -> None:
    result = check(OSTRYA_MAX_INFLIGHT="5", OSTRYA_WORKER_ID="w0", OSTRYA_MAX_IN_FLIGHT="5")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: unknown environment variable OSTRYA_MAX_INFLIGHT; no option reads it",
        "error: unknown environment variable OSTRYA_WORKER_ID; no option reads it",
    ]


def test_the_links_of_a_service_called_ostrya_are_called_what_they_are() -> None:
    links = {
        "OSTRYA_PORT": "tcp://10.0.0.1:50051",
        "OSTRYA_PORT_50051_TCP_ADDR": "10.0.0.1",
        "OSTRYA_SERVICE_HOST": "10.0.0.1",
    }
    result = check(**links)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all("enableServiceLinks: false" in line for line in lines)


@pytest.mark.parametrize("words", [["--max-in-flight", "many"], ["--discovery", "guess"], ["--no-such-option"]])
def test_what_cannot_be_parsed_is_2_too(words: list[str]) -> None:
    assert check(*words).exit_code == 2


def test_the_worker_has_it_too() -> None:
    assert check("--worker-id", "w0", service="worker").stdout == "configuration is valid\n"
    result = check("--worker-id", "w0", "--page-size", "7", service="worker", OSTRYA_MAX_IN_FLIGHT="5")
    assert result.exit_code == 2
    assert "OSTRYA_MAX_IN_FLIGHT" in result.stderr
