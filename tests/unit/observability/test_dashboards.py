"""The dashboards are well made: current, linked, placed, explained; every name they use is one that is exported."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy.observability import generate, panels
from deploy.observability.viewer import Dashboard, Panel, everything, load, substitute
from tests.unit.observability.exposition import families, sample_names
from tests.unit.observability.promql import metrics_of

FILES = sorted(generate.DIRECTORY.glob("*.json"))
RULES = generate.DIRECTORY.parent / "rules"
EACH = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

NOT_OURS = {
    "up",
    "process_start_time_seconds",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
    "tensorcore_utilization",
    "memory_bandwidth_utilization",
    "duty_cycle",
    "memory_used",
    "memory_total",
}
"""Prometheus' own, its client's, and those of GKE's TPU device plugin."""

NOT_SHOWN = {
    "ostrya_router_info": "read by the variables",
    "ostrya_worker_info": "read by the variables",
    "ostrya_router_undecodable_requests": "mistakes of a client alone; the log tells of them once a minute",
    "ostrya_worker_undecodable_requests": "the same",
    "ostrya_worker_padding_waste_ratio": "since the start; the panel shows the waste of now, from the two counters",
    "ostrya_worker_prompt_tokens": "prefill and the prefix cache are shown, of which it is the sum",
    "ostrya_worker_follower_steps": "of the other hosts of a slice; host 0 shows the same steps",
    "ostrya_worker_follower_restarts": "the same; host 0 shows its own restarts, which come with them",
}
"""Exported, and on no dashboard on purpose."""


def raw(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def drawn(path: Path) -> list[Panel]:
    return [panel for panel in load(path).panels if panel.type != "row"]


def expressions(path: Path) -> list[str]:
    dashboard = load(path)
    values = everything(dashboard, rate_interval="1m")
    return [substitute(target.expr, values) for panel in dashboard.panels for target in panel.targets]


def recorded() -> set[str]:
    groups = yaml.safe_load((RULES / "recording.yaml").read_text())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"]}


def rule_expressions() -> list[str]:
    documents = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yaml"))]
    return [rule["expr"] for document in documents for group in document["groups"] for rule in group["rules"]]


def test_the_files_are_what_the_boards_say() -> None:
    assert generate.stale() == []
    assert [path.stem for path in FILES] == sorted(generate.BOARDS)


def test_uids_and_titles_are_unique() -> None:
    assert len({board.uid for board in generate.BOARDS.values()}) == len(FILES)
    assert len({board.title for board in generate.BOARDS.values()}) == len(FILES)


@EACH
def test_links_lead_to_all_the_others_and_take_time_and_variables_along(path: Path) -> None:
    others = {board.uid for board in generate.BOARDS.values()} - {raw(path)["uid"]}
    links = raw(path)["links"]
    assert sorted(link["url"] for link in links) == sorted(f"/d/{uid}" for uid in others)
    assert all(link["keepTime"] and link["includeVars"] and link["type"] == "link" for link in links)


@EACH
def test_the_datasource_is_a_variable_everywhere(path: Path) -> None:
    uids = re.findall(r'"datasource": \{\s*"type": "(\w+)",\s*"uid": "([^"]*)"', path.read_text())
    assert set(uids) == {("prometheus", "${datasource}")}
    first = raw(path)["templating"]["list"][0]
    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")


@EACH
def test_pool_router_and_replica_can_be_chosen(path: Path) -> None:
    variables = {one["name"]: one for one in raw(path)["templating"]["list"]}
    for name in ("pool", "router", "replica"):
        one = variables[name]
        assert one["multi"]
        assert one["includeAll"]
        assert one["definition"].startswith("label_values(ostrya_")


@EACH
def test_ids_are_unique_and_no_panel_lies_on_another(path: Path) -> None:
    all_panels = load(path).panels
    assert len({panel.id for panel in all_panels}) == len(all_panels)
    for panel in all_panels:
        assert panel.grid_pos.x >= 0
        assert panel.grid_pos.x + panel.grid_pos.w <= panels.COLUMNS
    for one, other in combinations([panel.grid_pos for panel in all_panels], 2):
        apart = one.x + one.w <= other.x or other.x + other.w <= one.x
        assert apart or one.y + one.h <= other.y or other.y + other.h <= one.y


@EACH
def test_every_panel_is_explained_and_every_series_named(path: Path) -> None:
    titles = [panel.title for panel in drawn(path)]
    assert len(set(titles)) == len(titles)
    for panel in drawn(path):
        assert len(panel.description.split()) >= 8, panel.title
        assert panel.description.endswith("."), panel.title
        assert panel.targets, panel.title
        assert all(target.legend_format for target in panel.targets), panel.title
        assert panel.field_config is not None
        assert panel.field_config.defaults.unit, panel.title


@EACH
def test_every_expression_is_promql(path: Path) -> None:
    assert expressions(path)
    for expr in expressions(path):
        promql_parser.parse(expr)


@EACH
def test_every_variable_that_is_used_is_defined(path: Path) -> None:
    defined = {one.name for one in load(path).templating.list} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)", path.read_text())) - {"__all"}  # Grafana's word for All
    assert used <= defined


@EACH
def test_quantiles_and_ratios_are_computed_from_sums(path: Path) -> None:
    for expr in expressions(path):
        assert "avg(rate" not in expr
        assert not re.search(r"avg( by \([^)]*\))? \((rate|histogram_quantile)", expr)
        for inside in re.findall(r"histogram_quantile\([\d.]+, (.*)", expr):
            assert re.match(r"sum by \((\w+, )?le\) \(rate\(", inside)


def test_every_metric_that_is_used_is_exported() -> None:
    used = {name for path in FILES for expr in expressions(path) for name in metrics_of(expr)}
    used |= {name for expr in rule_expressions() for name in metrics_of(expr)}
    for path in FILES:
        definitions = [one.definition for one in load(path).templating.list if one.definition]
        used |= {match for text in definitions for match in re.findall(r"label_values\((\w+)", text)}
    assert used - set(sample_names()) - recorded() - NOT_OURS == set()


def test_every_metric_that_is_exported_is_shown_or_left_out_on_purpose() -> None:
    names = sample_names()
    shown = {names.get(name) for path in FILES for expr in expressions(path) for name in metrics_of(expr)}
    shown |= {names.get(name) for expr in rule_expressions() for name in metrics_of(expr)}
    missing = set(families()) - shown
    assert missing == set(NOT_SHOWN)


def test_a_panel_wider_than_the_grid_is_refused() -> None:
    row = panels.Row("Row", (panels.Panel(title="Wide", text="Too wide.", width=25),))
    board = panels.Board(uid="u", title="t", text="t", rows=(row,))
    with pytest.raises(ValueError, match="'Wide' is 25 wide; the grid has 24 columns"):
        panels.board_json(board, [board])


def test_a_changed_board_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "DIRECTORY", tmp_path)
    assert len(generate.stale()) == len(generate.BOARDS)
    for path, text in generate.rendered().items():
        path.write_text(text)
    assert generate.stale() == []
    (tmp_path / "left-over.json").write_text("{}")
    assert generate.stale() == [tmp_path / "left-over.json"]


def test_a_dashboard_survives_the_reader_that_plots_it() -> None:
    for path in FILES:
        dashboard: Dashboard = load(path)
        assert [panel.title for panel in dashboard.panels] == [panel["title"] for panel in raw(path)["panels"]]
