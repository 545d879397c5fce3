"""`ostrya doctor` against real processes: a sound stack, and each thing that can be wrong with one."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from ostrya.cli.doctor import doctor
from ostrya.state import members
from ostrya.state.connection import Connection
from tests.fakes.certificates import make_certificate, tls_endpoint
from tests.fakes.pool import member
from tests.fakes.prometheus_server import Scraped, prometheus
from tests.fakes.redis_server import RunningRedis, free_port, start_redis
from tests.fakes.router import FakeRouter
from tests.fakes.waiting import Stopwatch
from tests.integration.stack import RunningStack, start_stack

APP = typer.Typer()
APP.command()(doctor)
GHOST_S = 30.0
"""A router notices a silent worker by its lease within 5 s, by keepalive within 15 s; the machine may be busy."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(APP, arguments)


def findings(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings."""
    result = run(*arguments, "--json")
    document = json.loads(result.stdout)
    rows: list[dict[str, str]] = document["findings"]
    assert document["status"] == rows[0]["status"]
    return result.exit_code, rows


def said(*arguments: str) -> tuple[int, list[str]]:
    """Exit code and what is wrong, as `status check: sentence`."""
    code, rows = findings(*arguments)
    bad = [one for one in rows if one["status"] in ("fail", "warn")]
    assert all(one["advice"] for one in bad)
    return code, [f"{one['status']} {one['check']}: {one['sentence']}" for one in bad]


def eventually(condition: Callable[[], bool], what: Callable[[], object], timeout_s: float = GHOST_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def where(stack: RunningStack) -> tuple[str, ...]:
    return ("--target", stack.target, "--redis-url", stack.redis.url)


def scraped(stack: RunningStack) -> list[Scraped]:
    """What a scrape configuration for the stack would have."""
    return [
        Scraped(
            job="ostrya-router" if name == "router" else "ostrya-worker",
            address=url.removeprefix("http://").removesuffix("/metrics"),
            labels={"pool": "default", "replica": name},
        )
        for name, url in stack.metrics_urls.items()
    ]


def rule_file(directory: Path, *, fires: bool = False) -> Path:
    """Two rules of ours, as far as doctor can tell."""
    path = directory / "rules.json"
    alert = {
        "alert": "TooFewWorkers",
        "expr": f"count(ostrya_worker_info) {'>' if fires else '<'} 0",
        "labels": {"severity": "page"},
        "annotations": {"summary": "look at the workers", "runbook_url": "runbooks/TooFewWorkers.md"},
    }
    record = {"record": "ostrya:workers", "expr": "count(ostrya_worker_info)"}
    other = {"alert": "NotOurs", "expr": "vector(1)"}
    path.write_text(json.dumps({"groups": [{"name": "some", "rules": [record, alert, other]}]}))
    return path


def test_a_sound_stack_has_no_complaint_and_exit_code_0(stack: RunningStack, tmp_path: Path) -> None:
    with prometheus(tmp_path, *scraped(stack), rule_files=(rule_file(tmp_path),)) as url:
        code, rows = findings(*where(stack), "--prometheus", url)
        shown = run(*where(stack), "--prometheus", url)
    assert {one["status"] for one in rows} == {"ok", "skipped"}, rows
    assert [one["check"] for one in rows if one["status"] == "skipped"] == ["tls"]
    assert code == shown.exit_code == 0
    sentences = " ".join(one["sentence"] for one in rows)
    assert "pool 'default' has 2 ready replicas" in sentences
    assert "3 targets up" in sentences
    assert "2 rules of Ostrya loaded" in sentences
    assert "11 ok, 1 skipped" in shown.stdout
    assert "→" not in shown.stdout


def test_prometheus_without_the_jobs_or_with_a_part_of_them_is_told(stack: RunningStack, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "some").mkdir()
    with prometheus(tmp_path / "none") as url:
        code, bad = said(*where(stack), "--prometheus", url)
    assert code == 1
    assert any("has no target of the jobs ostrya-router and ostrya-worker" in one for one in bad)
    assert any(one.startswith("warn rules: ") for one in bad)

    gone = Scraped("ostrya-worker", f"127.0.0.1:{free_port()}", {"pool": "default", "replica": "worker-1"})
    some = [one for one in scraped(stack) if one.labels["replica"] != "worker-1"]
    rules = rule_file(tmp_path, fires=True)
    with prometheus(tmp_path / "some", *some, gone, rule_files=(rules,)) as url:
        asking = (*where(stack), "--prometheus", url)
        firing = "fail alerts: TooFewWorkers fires: look at the workers"
        eventually(lambda: firing in said(*asking)[1], lambda: said(*asking))
        code, bad = said(*asking)
    assert code == 1
    assert bad == [
        "fail scraping: Prometheus cannot scrape worker-1",
        "fail scraping: Prometheus has no metrics of worker-1 of pool 'default', which the routers use",
        firing,
    ]


@pytest.fixture(scope="module")
def fragile() -> Iterator[RunningStack]:
    """A stack for tests that break it, in their order."""
    running = start_stack()
    yield running
    running.processes["worker-1"].send_signal(signal.SIGCONT)
    running.close()


def test_a_member_with_another_schema_is_named(fragile: RunningStack) -> None:
    async def register() -> None:
        connection = Connection(fragile.redis.url)
        try:
            await connection.all(members.put("default", msgspec.structs.replace(member("stranger"), schema=99)))
        finally:
            await connection.close()

    asyncio.run(register())
    code, bad = said(*where(fragile))
    assert code == 1
    (schema,) = [one for one in bad if one.startswith("fail schema")]
    assert "; 99 (the row of stranger in Redis); they misread each other" in schema


def test_a_worker_that_hangs_is_named_with_its_router(fragile: RunningStack) -> None:
    fragile.processes["worker-1"].send_signal(signal.SIGSTOP)

    def named() -> bool:
        code, bad = said(*where(fragile))
        return code == 1 and any(one.startswith("fail replicas: replica worker-1 hangs: ") for one in bad)

    eventually(named, lambda: said(*where(fragile)))
    fragile.processes["worker-1"].send_signal(signal.SIGCONT)
    eventually(lambda: not named(), lambda: said(*where(fragile)))


def test_redis_that_was_killed_is_told_by_both_sides(fragile: RunningStack) -> None:
    fragile.redis.kill()
    unconnected = f"fail knowledge: router {fragile.target} is not connected to Redis"
    eventually(lambda: unconnected in said(*where(fragile))[1], lambda: said(*where(fragile)))
    code, bad = said(*where(fragile))
    assert code == 1
    assert any(one.startswith(f"fail redis: Redis at {fragile.redis.url} cannot be used: ") for one in bad)


def test_a_router_that_was_stopped_is_unreachable_and_no_traceback(fragile: RunningStack) -> None:
    fragile.processes["router"].terminate()
    fragile.processes["router"].wait(20)
    result = run("--target", fragile.target)
    assert result.exit_code == 1
    assert "does not answer" in " ".join(result.stdout.split())
    assert "→ Check that its process or pod runs" in " ".join(result.stdout.split())
    assert "Traceback" not in result.output


def test_somebody_who_never_answers_costs_one_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody speaks
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        everything = ("--redis-url", f"redis://{address}/0", "--prometheus", f"http://{address}", "--tls", address)
        watch = Stopwatch()
        code, bad = said("--target", address, *everything, "--timeout-s", "1")
        took_s = watch.seconds()
    assert code == 1
    assert {one.partition(":")[0] for one in bad} == {"fail router", "fail redis", "fail scraping", "fail tls"}
    assert took_s < 4


@pytest.mark.parametrize(
    ("days", "names", "sentence"),
    [
        (-3, ("127.0.0.1",), "fail tls: the certificate of {} expired 3 days ago"),
        (5, ("127.0.0.1",), "warn tls: the certificate of {} expires in 4 days"),
        (60, ("router.example",), "fail tls: the certificate of {} is for router.example, not for 127.0.0.1"),
        (60, ("127.0.0.1",), None),
    ],
)
async def test_certificates_are_looked_at_through_a_real_handshake(
    tmp_path: Path, days: int, names: tuple[str, ...], sentence: str | None
) -> None:
    now = datetime.now(UTC)
    made = make_certificate(names, not_before=now - timedelta(days=30), not_after=now + timedelta(days=days))
    with FakeRouter() as router:
        async with tls_endpoint(made, tmp_path) as endpoint:
            _, bad = await asyncio.to_thread(said, "--target", router.target, "--tls", endpoint)
    about_tls = [one for one in bad if " tls: " in one]
    assert about_tls == ([sentence.format(endpoint)] if sentence else [])


@pytest.fixture
def locked_redis() -> Iterator[RunningRedis]:
    running = start_redis()
    yield running
    running.stop()


def test_passwords_never_appear(locked_redis: RunningRedis) -> None:
    secret = "correcthorse"
    with socket.create_connection(("127.0.0.1", locked_redis.port)) as connection:
        connection.sendall(b"CONFIG SET requirepass another\r\n")
        assert connection.recv(100).startswith(b"+OK")
    urls = (
        ("--redis-url", f"redis://user:{secret}@127.0.0.1:{locked_redis.port}/0"),
        ("--redis-url", f"rediss://:{secret}@127.0.0.1:{locked_redis.port}/0"),
        ("--redis-url", f"redis://:{secret}#x@127.0.0.1/0"),
        ("--redis-url", f"http://:{secret}@127.0.0.1/0"),
        ("--prometheus", f"http://user:{secret}@127.0.0.1:{locked_redis.port}/?token={secret}"),
        ("--prometheus", f"https://user:{secret}@127.0.0.1:{locked_redis.port}"),
        ("--prometheus", f"http://user:{secret}@127.0.0.1:x"),
    )
    with FakeRouter() as router:
        for option, url in urls:
            for more in ((), ("--json",)):
                result = run("--target", router.target, option, url, "--timeout-s", "2", *more)
                assert result.exit_code in (1, 2)
                assert secret not in result.output


SECRET = "correcthorse"


@pytest.mark.parametrize(
    ("option", "url"),
    [
        ("--redis-url", f"redis://:12/{SECRET}@127.0.0.1:6379/0"),
        ("--redis-url", f"redis://u:/{SECRET}@127.0.0.1:6379/0"),
        ("--redis-url", f"redis://:{SECRET}@h/0?db={SECRET}x"),
        ("--redis-url", f"redis://h?socket_timeout={SECRET}"),
        ("--redis-url", f"rediss://u:12?ssl_ca_certs={SECRET}@127.0.0.1"),
        ("--redis-url", f"unix:///s?db={SECRET}"),
        ("--prometheus", f"http://u:12/{SECRET}@127.0.0.1"),
        ("--prometheus", f"http://u:12?{SECRET}@127.0.0.1"),
        ("--prometheus", f"http://u:12#{SECRET}@127.0.0.1"),
        ("--prometheus", f"http:///{SECRET}"),
    ],
)
def test_a_url_whose_password_looks_like_another_part_is_refused_without_it(option: str, url: str) -> None:
    result = run(option, url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {option} ")
    assert SECRET not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pool", "nosuch"),
        ("--target", "nonsense"),
        ("--target", "127.0.0.1:99999"),
        ("--redis-url", "http://127.0.0.1"),
        ("--prometheus", "127.0.0.1:9090"),
        ("--tls", "router.example"),
        ("--timeout-s", "0"),
        ("--timeout-s", "nan"),
    ],
)
def test_bad_input_is_exit_code_2(arguments: tuple[str, str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert arguments[0] in result.stderr
