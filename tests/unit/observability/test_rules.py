"""The rules: promtool runs their tests, every alert is in those, and every alert has a page that says what to do."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.unit.observability.promql import metrics_of

HERE = Path(__file__).parent
OBSERVABILITY = HERE.parents[2] / "deploy" / "observability"
RULES = sorted((OBSERVABILITY / "rules").glob("*.yaml"))
TESTS = sorted(HERE.glob("rules*_test.yaml"))
RUNBOOKS = OBSERVABILITY / "runbooks"
README = OBSERVABILITY / "README.md"
SECTIONS = ("## What it means", "## What users see", "## Check", "## Do", "## Ignore it when")

Key = tuple[str, str, str]
"""Alert, severity, window ("" for most): one alert name may have several rules."""


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        skip_or_fail = pytest.fail if os.environ.get("OSTRYA_REQUIRE_ALL") == "1" else pytest.skip
        skip_or_fail("no promtool on this machine")
    assert program is not None
    # A third of its CPU would be spent on collecting garbage of a few MB.
    collecting = os.environ | {"GOGC": "400"}
    return subprocess.run([program, *arguments], env=collecting, capture_output=True, text=True, check=False)


@functools.cache
def document(path: Path) -> dict[str, Any]:
    """Parsed once, by the reader in C: ten times as fast."""
    parsed: dict[str, Any] = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    return parsed


def rules() -> list[dict[str, object]]:
    return [rule for path in RULES for group in document(path)["groups"] for rule in group["rules"]]


def alerts() -> dict[Key, dict[str, dict[str, str]]]:
    found = {}
    for rule in rules():
        if "alert" in rule:
            labels = rule["labels"]
            assert isinstance(labels, dict)
            found[str(rule["alert"]), str(labels["severity"]), str(labels.get("window", ""))] = rule
    return found  # type: ignore[return-value]


def moments() -> Iterator[tuple[str, float, list[dict[str, str]]]]:
    """Of every test: its name, a time in minutes, and the labels of the alerts that must fire then."""
    for path in TESTS:
        for test in document(path)["tests"]:
            for check in test["promql_expr_test"]:
                assert check["expr"] == 'ALERTS{alertstate="firing"}', "a test must see every alert, not only its own"
                amount, unit = re.fullmatch(r"(\d+)([mh])", check["eval_time"]).groups()  # type: ignore[union-attr]
                samples = [dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"])) for sample in check["exp_samples"]]
                yield test["name"], int(amount) * (60 if unit == "h" else 1), samples


def key(labels: dict[str, str]) -> Key:
    return labels["alertname"], labels["severity"], labels.get("window", "")


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_promtool_accepts_the_rules(path: Path) -> None:
    checked = promtool("check", "rules", str(path))
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_promtool_passes_the_tests_of_the_rules(path: Path) -> None:
    tested = promtool("test", "rules", str(path))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_seen_silent_then_firing_then_resolved() -> None:
    untested = set()
    for alert in alerts():
        by_test: dict[str, list[bool]] = {}
        for name, _, firing in sorted(moments(), key=lambda moment: moment[1]):
            by_test.setdefault(name, []).append(alert in map(key, firing))
        # Silent, firing, silent again in one and the same test.
        if not any(not seen[0] and True in seen and not seen[-1] for seen in by_test.values()):
            untested.add(alert)
    assert untested == set()


@pytest.mark.parametrize("name", ["a healthy fleet under load", "an idle fleet"])
def test_nothing_fires_when_nothing_is_wrong(name: str) -> None:
    seen = [firing for test, _, firing in moments() if test == name]
    assert len(seen) >= 4
    assert seen == [[]] * len(seen)


def test_the_healthy_fleet_has_every_metric_that_alerts_read() -> None:
    (healthy,) = (
        test for path in TESTS for test in document(path)["tests"] if test["name"] == "a healthy fleet under load"
    )
    given = {re.match(r"\w+", series["series"])[0] for series in healthy["input_series"]}  # type: ignore[index]
    recorded = {str(rule["record"]) for rule in rules() if "record" in rule}
    read = {name for rule in rules() for name in metrics_of(str(rule["expr"]))} - recorded
    assert read - given == set()


def test_annotations_use_only_labels_that_the_alert_has() -> None:
    has: dict[Key, list[set[str]]] = {}
    for _, _, firing in moments():
        for labels in firing:
            has.setdefault(key(labels), []).append(set(labels))
    for alert, rule in alerts().items():
        text = " ".join(rule["annotations"].values())
        optional = set(re.findall(r"\{\{ if \$labels\.(\w+) \}\}", text))
        used = set(re.findall(r"\$labels\.(\w+)", text)) - optional
        assert all(used <= labels for labels in has[alert]), (alert, used)


def test_every_rule_says_how_bad_it_is_and_what_to_read() -> None:
    for (name, severity, _), rule in alerts().items():
        assert severity in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"deploy/observability/runbooks/{name}.md"


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {name for name, _, _ in alerts()}


@pytest.mark.parametrize("path", sorted(RUNBOOKS.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_says_what_to_do(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# {path.stem}\n")
    positions = [text.find(section) for section in SECTIONS]
    assert -1 not in positions
    assert positions == sorted(positions)
    for query in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
        for line in query.strip().splitlines():
            promql_parser.parse(line)


def test_the_readme_lists_every_alert_with_its_severities() -> None:
    listed = dict(re.findall(r"^\| \[(\w+)\]\(runbooks/\w+\.md\) \| ([a-z, ]+) \|", README.read_text(), re.MULTILINE))
    severities: dict[str, set[str]] = {}
    for name, severity, _ in alerts():
        severities.setdefault(name, set()).add(severity)
    assert {name: set(words.split(", ")) for name, words in listed.items()} == severities


def test_every_file_that_a_page_links_to_exists() -> None:
    for page in (README, *RUNBOOKS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)
