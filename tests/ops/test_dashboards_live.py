"""Every query of every panel and rule returns data from a real Prometheus that reads the real stack under load."""

import json
import math
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability import plot
from deploy.observability.generate import DIRECTORY
from deploy.observability.viewer import Series, everything, load, substitute
from tests.ops.observed import Observed, finish, observed
from tests.ops.prometheus_server import OBSERVABILITY
from tests.unit.observability.promql import selectors

pytestmark = pytest.mark.alone  # beside what takes all cores its stack is not healthy, and alerts say so

DASHBOARDS = sorted(DIRECTORY.glob("*.json"))
EACH = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
RATE_INTERVAL = "4s"
"""Grafana's: four scrape intervals."""
CHOSEN = {
    "pool": "(default)",
    "router": "(router)",
    "replica": "(worker-0|worker-1)",
    "tpu_model": "(tpu-v6e-slice)",
    "tpu_topology": "(2x2)",
}
"""As Grafana writes several chosen values."""


@pytest.fixture(scope="module")
def seen() -> Iterator[Observed]:
    """A stack that was under load, had requests waiting and lost a client; all of it is in Prometheus."""
    with observed() as running:
        load_test = running.bench(requests=60)
        running.go_away()
        running.keep_waiting()
        finish(load_test)
        running.wait_scraped()
        yield running


def has_data(found: list[Series]) -> bool:
    return any(math.isfinite(value) for series in found for _, value in series.samples)


def rules(name: str) -> list[dict[str, str]]:
    groups = yaml.safe_load((OBSERVABILITY / "rules" / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@EACH
@pytest.mark.parametrize("choice", ["all", "some"])
def test_every_query_of_every_panel_returns_data(seen: Observed, path: Path, choice: str) -> None:
    dashboard = load(path)
    variables = everything(dashboard, rate_interval=RATE_INTERVAL)
    if choice == "some":
        variables |= CHOSEN
    empty, num_queries = [], 0
    for panel in dashboard.panels:
        for target in panel.targets:
            expr = substitute(target.expr, variables)
            num_queries += 1
            if target.instant:
                found = seen.prometheus.series(expr)
            else:
                found = seen.prometheus.range(expr, start=seen.since, end=time.time(), step=1)
            if not has_data(found):
                empty.append((panel.title, expr))
    assert num_queries > 0
    assert empty == []


@EACH
def test_every_variable_offers_what_there_is(seen: Observed, path: Path) -> None:
    dashboard = load(path)
    variables = everything(dashboard, rate_interval=RATE_INTERVAL)
    offered = {
        one.name: seen.prometheus.label_values(substitute(one.definition, variables))
        for one in dashboard.templating.list
        if one.type == "query"
    }
    expected = {name: text.strip("()").split("|") for name, text in CHOSEN.items()}
    assert offered == {name: expected[name] for name in offered}


def test_every_recording_rule_has_recorded_a_number(seen: Observed) -> None:
    missing = [
        rule["record"] for rule in rules("recording.yaml") if not has_data(seen.prometheus.series(rule["record"]))
    ]
    assert missing == []


def test_every_selector_of_every_alert_finds_series(seen: Observed) -> None:
    # But the one that takes off what only a slice's other hosts have; they export it in test_slice_lost.py.
    missing, expected = [], [("ScrapeMissing", "ostrya_worker_follower_phase{}")]
    for rule in rules("alerts.yaml"):
        for selector in selectors(rule["expr"]):
            selector.offset = None  # the stack is younger than the offset
            if not has_data(seen.prometheus.series(str(selector))):
                missing.append((rule["alert"], str(selector)))
    assert missing == expected


def test_no_rule_fails_and_no_alert_fires_on_a_healthy_stack(seen: Observed) -> None:
    with urllib.request.urlopen(f"{seen.server.url}/api/v1/rules", timeout=10) as answer:
        groups: list[dict[str, Any]] = json.load(answer)["data"]["groups"]
    loaded = [rule for group in groups for rule in group["rules"]]
    assert len(loaded) == len(rules("recording.yaml")) + len(rules("alerts.yaml"))
    assert [(rule["name"], rule.get("lastError")) for rule in loaded if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in loaded if rule.get("state") == "firing"] == []


def test_the_plots_show_every_panel(seen: Observed, tmp_path: Path) -> None:
    arguments = ["--prometheus", seen.server.url, "--minutes", "2", "--rate-interval", RATE_INTERVAL]
    assert plot.main([*arguments, "--out", str(tmp_path), *map(str, DASHBOARDS)]) == 0
    for path in DASHBOARDS:
        image = (tmp_path / f"{path.stem}.png").read_bytes()
        assert image.startswith(b"\x89PNG")
        assert 20_000 < len(image) < 300_000
