"""`ostrya workers` and what it does to one."""

import re
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from ostrya.cli import main
from ostrya.cli.workers import app
from ostrya.errors import Unavailable
from ostrya.service import status
from tests.fakes.router import FakeRouter

Run = Callable[..., Result]


@pytest.fixture
def run(router: FakeRouter) -> Run:
    def run(*words: str, target: str = "") -> Result:
        return CliRunner().invoke(app, list(words), env={"OSTRYA_TARGET": target or router.target, "COLUMNS": "200"})

    return run


def test_without_a_subcommand_it_is_the_list_with_what_holds_each_replica(run: Run, router: FakeRouter) -> None:
    router.holds = ["maintenance", "termination_impending"]
    result = run()
    assert result.exit_code == 0
    assert "ready, maintenance, termination impending" in result.stdout


@pytest.mark.parametrize(
    ("words", "order", "line"),
    [
        (("cordon",), ("cordon", None), "worker-0 is cordoned: it takes no new work\n"),
        (("uncordon",), ("uncordon", None), "worker-0 is uncordoned: it takes new work\n"),
        (("drain",), ("drain", None), "worker-0 is drained: it takes no new work and has none\n"),
        (("drain", "--timeout-s", "2.5"), ("drain", 2.5), "worker-0 is drained: it takes no new work and has none\n"),
    ],
)
def test_a_worker_is_told_and_a_line_says_so(
    run: Run, router: FakeRouter, words: tuple[str, ...], order: tuple[str, float | None], line: str
) -> None:
    result = run(*words, "worker-0")
    assert (result.exit_code, result.stdout) == (0, line)
    assert router.orders == [(order[0], "worker-0", order[1])]


@pytest.mark.parametrize(
    ("num", "words"),
    [(1, "1 request was still running and goes on"), (3, "3 requests were still running and go on")],
)
def test_a_drain_says_what_went_on_elsewhere(run: Run, router: FakeRouter, num: int, words: str) -> None:
    router.num_cancelled = num
    assert f"; {words} elsewhere\n" in run("drain", "worker-0").stdout


def test_the_help_says_what_the_state_draining_means(run: Run) -> None:
    """Routers hear from health only whether a worker takes new work, not why it does not."""
    assert "draining means that the replica says it takes no new work" in " ".join(run("--help").stdout.split())


@pytest.mark.parametrize("what", ["cordon", "uncordon", "drain"])
def test_an_unknown_worker_is_one_line_and_an_exit_code(run: Run, what: str) -> None:
    result = run(what, "worker-9")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: replica 'worker-9' is not known here; replicas: worker-0\n",
    )


def test_a_worker_that_does_not_answer_is_one_line(run: Run, router: FakeRouter) -> None:
    words = "replica worker-0 did not answer: Connection refused"
    for what in ("cordon", "uncordon", "drain"):
        router.failures = [status.with_retry(Unavailable(words), None)]
        result = run(what, "worker-0")
        assert (result.exit_code, result.stderr) == (1, f"error: {words}\n")


def test_the_target_may_stand_before_or_after_the_subcommand(run: Run, router: FakeRouter) -> None:
    for words in (
        ("--target", router.target, "cordon", "worker-0"),
        ("cordon", "worker-0", "--target", router.target),
        ("--target", "127.0.0.1:1", "cordon", "worker-0", "--target", router.target),
    ):
        assert run(*words, target="127.0.0.1:1").exit_code == 0
    assert len(router.orders) == 3


def test_a_negative_drain_time_is_a_usage_error(run: Run, router: FakeRouter) -> None:
    assert run("drain", "worker-0", "--timeout-s=-1").exit_code == 2
    assert router.orders == []


# As long as Kubernetes lets them be, alike but for the end.
LONG_IDS = [f"{'a-release-with-a-long-name-and-a-pool-with-one-too'}-worker-{index}" for index in range(11)]
COMMANDS = (("workers",), ("explain", "decision-1"))


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("columns", ["40", "80"])
def test_in_a_pipe_every_replica_is_a_whole_line_however_wide(
    router: FakeRouter, words: tuple[str, ...], columns: str
) -> None:
    router.worker_ids = LONG_IDS
    router.holds = ["maintenance", "termination_impending"]
    env = {"OSTRYA_TARGET": router.target, "COLUMNS": columns}
    lines = CliRunner().invoke(main.app, list(words), env=env).stdout.splitlines()
    assert {line.split()[0] for line in lines if line.startswith("a-release")} >= set(LONG_IDS)
    assert [line for line in lines if line != line.rstrip() or "…" in line] == []
    if words == ("workers",):
        rows = [line for line in lines if line.startswith("a-release")]
        assert [line.split()[1] for line in rows] == [f"127.0.0.1:{7000 + index}" for index in range(11)]
        assert all("ready, maintenance, termination impending" in line for line in rows)


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_terminal_folds_what_tells_replicas_apart_and_shortens_nothing(
    router: FakeRouter, words: tuple[str, ...], columns: int
) -> None:
    router.worker_ids = LONG_IDS
    env = {"OSTRYA_TARGET": router.target, "COLUMNS": str(columns), "FORCE_COLOR": "1"}
    shown = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(main.app, list(words), env=env).stdout)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    # Of a folded id the first column has the parts, one below the other.
    column = "".join(line.split()[0] for line in shown.splitlines() if line.strip())
    assert [one for one in LONG_IDS if one not in column] == []


def test_a_terminal_of_80_columns_has_room_for_the_ids_of_the_chart(router: FakeRouter) -> None:
    router.worker_ids = ["ostrya-default-worker-0", "ostrya-default-worker-1"]
    env = {"OSTRYA_TARGET": router.target, "COLUMNS": "80", "FORCE_COLOR": "1"}
    shown = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(main.app, ["workers"], env=env).stdout)
    rows = [line.split() for line in shown.splitlines() if line.startswith("ostrya-default")]
    assert [row[0] for row in rows] == router.worker_ids
    assert all(len(row) == 9 for row in rows), "a row is a line, without the address"
