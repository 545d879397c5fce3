"""What plot.py makes of a dashboard: variables, legends, units, and pictures that hide nothing."""

import math

import pytest
from matplotlib.figure import Figure

from deploy.observability.draw import Line, draw
from deploy.observability.generate import DIRECTORY
from deploy.observability.units import shown
from deploy.observability.viewer import Panel, everything, legend, load, substitute

START, END = 1_000_000.0, 1_000_060.0
PANELS = {panel.title: panel for path in DIRECTORY.glob("*.json") for panel in load(path).panels if panel.targets}


def texts(panel: Panel, lines: list[Line]) -> list[str]:
    """Every word that is drawn."""
    figure = Figure()
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    draw(axes, panel, lines, start=START, end=END)
    found = [text.get_text() for text in axes.texts]
    if (shown_legend := axes.get_legend()) is not None:
        found += [text.get_text() for text in shown_legend.get_texts()]
    return found


def line(name: str, *values: float, **labels: str) -> Line:
    return Line(name, labels, [(START + 10 * place, value) for place, value in enumerate(values)])


def test_variables_are_replaced_and_an_unknown_one_is_an_error() -> None:
    assert substitute('up{pool=~"$pool"}[${__rate_interval}]', {"pool": ".*", "__rate_interval": "4s"}) == (
        'up{pool=~".*"}[4s]'
    )
    with pytest.raises(KeyError, match="replica"):
        substitute('up{replica=~"$replica"}', {})


def test_all_is_chosen_in_every_variable() -> None:
    values = everything(load(DIRECTORY / "tpu-hardware.json"), rate_interval="1m")
    assert values == dict.fromkeys(("pool", "router", "replica", "tpu_model", "tpu_topology"), ".*") | {
        "__rate_interval": "1m"
    }


def test_a_legend_leaves_absent_labels_empty() -> None:
    assert legend("{{replica}} {{ phase }}", {"replica": "w0"}) == "w0"
    assert legend("p99", {"replica": "w0"}) == "p99"


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "expected"),
    [
        (0.0421, "s", None, "42.1 ms"),
        (0.0, "s", None, "0 s"),
        (90.0, "s", None, "1.5 min"),
        (0.99873, "percentunit", 3, "99.873 %"),
        (63.0, "percent", None, "63 %"),
        (3.0 * 2**30, "bytes", None, "3 GiB"),
        (1234.0, "suffix: tok/s", None, "1.23 k tok/s"),
        (2.5, "reqps", None, "2.5 req/s"),
        (2.0, "short", 0, "2"),
        (-0.05, "percentunit", None, "-5 %"),
        (math.nan, "s", None, "-"),
    ],
)
def test_numbers_are_shown_in_their_unit(value: float, unit: str, decimals: int | None, expected: str) -> None:
    assert shown(value, unit, decimals) == expected


@pytest.mark.parametrize("lines", [[], [line("p99", math.nan, math.nan)]])
def test_a_panel_without_numbers_says_so(lines: list[Line]) -> None:
    assert texts(PANELS["Wait for a replica"], lines) == ["No data"]


def test_lines_are_named_and_what_has_no_room_is_counted() -> None:
    panel = PANELS["TensorCore utilization"]
    lines = [line(f"worker-0 with a long name {number}", 1.0, 2.0) for number in range(40)]
    words = texts(panel, lines)
    assert words[0] == "worker-0 with a long name 0"
    assert words[-1] == f"and {40 - len(words) + 1} more"


def test_states_are_shown_by_their_words() -> None:
    assert texts(PANELS["Workers"], [line("w0", 0, 0, 0, 1, 1, 1)]) == ["starting", "ready"]


def test_a_stat_is_shown_with_its_newest_number() -> None:
    panel = PANELS["Availability, last hour"]
    assert texts(panel, [line("a", math.nan, 0.5, 0.9995, math.nan)]) == ["99.950 %", "a"]


def test_bars_show_their_sum() -> None:
    loads = line("", 2.0, replica="w0", phase="load")
    warm = line("", 1.5, replica="w0", phase="warmup")
    assert texts(PANELS["Start-up phases"], [loads, warm]) == ["  3.5 s", "load", "warmup"]
