"""`ostrya doctor`: what is wrong with a running install, in plain words, and what to do."""

import asyncio
import urllib.parse
from typing import TYPE_CHECKING, Annotated

import typer

from ostrya.cli import report
from ostrya.cli.report import DEFAULT_TARGET, FAILED, USAGE, AsJson, fail, reported
from ostrya.service import checks

if TYPE_CHECKING:
    from ostrya.cli.diagnosis.findings import Finding
    from ostrya.cli.probes import Questions

_SPELLING = "in its user and password, write / as %2F, ? as %3F, # as %23, @ as %40"
_STYLES = {"fail": "bold red", "warn": "yellow", "ok": "green", "skipped": "dim"}

Targets = Annotated[
    list[str],
    typer.Option("--target", envvar="OSTRYA_TARGET", help="host:port of a router; of every router behind a name."),
]
RedisUrl = Annotated[
    str, typer.Option("--redis-url", envvar="OSTRYA_REDIS_URL", help="The pool's Redis; empty = not looked at.")
]
Pool = Annotated[str, typer.Option("--pool", help="Whose rows in Redis to look at; empty = what the routers serve.")]
Prometheus = Annotated[
    str, typer.Option("--prometheus", help="URL of the Prometheus that should scrape it; empty = not looked at.")
]
Tls = Annotated[list[str], typer.Option("--tls", help="host:port whose certificate to look at.")]
Timeout = Annotated[float, typer.Option("--timeout-s", help="For each answer.")]


def doctor(
    target: Targets = [DEFAULT_TARGET],  # noqa: B006 - typer copies it
    redis_url: RedisUrl = "",
    pool: Pool = "",
    prometheus: Prometheus = "",
    tls: Tls = [],  # noqa: B006
    as_json: AsJson = False,
    timeout_s: Timeout = 5.0,
) -> None:
    """Say what is wrong with a running install, and what to do. Exit code 0: nothing failed, 1: something did."""
    from ostrya.cli import probes
    from ostrya.cli.diagnosis import diagnose
    from ostrya.cli.diagnosis.findings import Status

    questions = probes.Questions(
        targets=tuple(target),
        redis_url=redis_url,
        pool=pool,
        prometheus=prometheus,
        tls=tuple(tls),
        timeout_s=timeout_s,
    )
    if problems := bad_input(questions):
        fail("\nerror: ".join(problems), USAGE)
    with reported():
        findings = diagnose(asyncio.run(probes.ask(questions)))
    if as_json:
        print(as_document(findings))
    else:
        show(findings)
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(FAILED)


def bad_input(questions: "Questions") -> list[str]:
    """What cannot be looked at as asked for."""
    problems = []
    for option, addresses in (("target", questions.targets), ("tls", questions.tls)):
        wrong = [one for one in addresses if not checks.is_address(one)]
        problems += [f"--{option} is {one!r}; it must be host:port, like {DEFAULT_TARGET}" for one in wrong]
    # URLs may hold a password, so they are not quoted.
    if questions.redis_url:
        problems += [one.replace("redis_url", "--redis-url", 1) for one in checks.redis_url(questions.redis_url)]
    elif questions.pool:
        problems.append("--pool says whose rows in Redis to look at; give --redis-url too, or leave it out")
    if questions.prometheus and not _is_web(questions.prometheus):
        problems.append(f"--prometheus is not a URL like http://prometheus:9090; {_SPELLING}")
    if not 0 < questions.timeout_s <= 300:
        problems.append(f"--timeout-s is {questions.timeout_s}; it must be above 0 and at most 300")
    return problems


def as_document(findings: "list[Finding]") -> str:
    """For machines."""
    import json

    rows = [
        {"check": one.check, "status": one.status.value, "sentence": one.sentence, "advice": one.advice}
        for one in findings
    ]
    worst = findings[0].status.value if findings else "ok"
    return json.dumps({"status": worst, "findings": rows}, indent=2, ensure_ascii=False)


def show(findings: "list[Finding]") -> None:
    """For a person: the worst first, each with what to do."""
    from collections import Counter

    from rich.table import Table

    rows = Table.grid(padding=(0, 1))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for one in findings:
        advice = f"\n[bold]→[/bold] {_escaped(one.advice)}" if one.advice else ""
        style = _STYLES[one.status.value]
        rows.add_row(f"[{style}]{one.status.value}[/{style}]", one.check, _escaped(one.sentence) + advice)
    counts = Counter(one.status.value for one in findings)
    report.show(rows, "\n" + ", ".join(f"{counts[name]} {name}" for name in _STYLES if counts[name]))


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _is_web(url: str) -> bool:
    """An @ after the host is a part of a password, and so is then what looks like port and path."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_dialled = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False
    return parts.scheme in ("http", "https") and is_dialled and "@" not in parts.path + parts.query + parts.fragment
