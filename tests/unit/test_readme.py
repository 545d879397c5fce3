"""README and docs/ are true: programs run as pasted, the metrics table is what processes export, links lead on."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from ostrya.capacity.estimate import held_out_errors, residuals
from ostrya.router.metrics import KubernetesMetrics, RouterMetrics
from ostrya.service.metrics import MetricsEndpoint
from ostrya.worker.following import FollowerMetrics
from ostrya.worker.metrics import WorkerMetrics
from ostrya.worker.usage import EngineUsage
from tests.fakes.router import FakeRouter

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = (README, ROOT / "services" / "README.md", ROOT / "tests" / "README.md", *sorted(DOCS.glob("*.md")))


def program(name: str) -> str:
    pages = "".join(page.read_text() for page in PAGES)
    found = re.search(rf"^```python {name}\n(.*?)^```", pages, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("name", "max_lines"), [("client", 5), ("raw", 10), ("structured", 9)])
def test_a_program_runs_as_pasted(name: str, max_lines: int) -> None:
    code = program(name)
    assert len([line for line in code.splitlines() if line.strip()]) <= max_lines
    with FakeRouter() as router:
        pasted = code.replace("127.0.0.1:50051", router.target)
        done = subprocess.run([sys.executable, "-c", pasted], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("Ironwood is hard.")


def rows(registry: CollectorRegistry) -> Iterator[str]:
    # The registry's public side shows a labelled metric's labels only after it has been used.
    for metric in registry._collector_to_names:
        assert isinstance(metric, MetricWrapperBase | EngineUsage)
        for family in metric.describe():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = metric._labelnames if isinstance(metric, MetricWrapperBase) else ("model",)
            yield f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |"


def test_the_metrics_table_is_what_the_processes_export() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry, model="m", pool="p")
    KubernetesMetrics(registry)
    WorkerMetrics(registry, model="m")
    FollowerMetrics(registry, model="m")
    MetricsEndpoint(registry, "127.0.0.1", 0)
    expected = sorted(rows(registry))
    shown = [line for line in (DOCS / "metrics.md").read_text().splitlines() if line.startswith("| `ostrya_")]
    assert shown == expected, "the table should be\n" + "\n".join(expected)


def test_every_file_on_the_map_exists() -> None:
    named = set(re.findall(r"\b[a-z_]+(?:/[a-z_]+)+\.(?:py|lua)\b", (ROOT / "services" / "README.md").read_text()))
    assert len(named) > 20
    assert {name for name in named if not (ROOT / "services" / "ostrya" / name).is_file()} == set()


def test_the_trust_in_estimates_is_what_the_check_finds() -> None:
    errors = held_out_errors(residuals())
    said = f"off by {median(errors):.0%} in the median and {errors[-1]:.0%} at worst".replace("%", " %")
    assert said in (DOCS / "capacity.md").read_text()


def test_a_newcomer_reads_150_lines_at_most() -> None:
    assert len(README.read_text().splitlines()) <= 150


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    targets = [(link, *link.partition("#")[::2]) for link in links]
    files = {link: (page.parent / file).resolve() if file else page for link, file, _ in targets}
    assert [link for link, file in files.items() if not file.exists()] == []
    assert [link for link, _, anchor in targets if anchor and anchor not in anchors(files[link])] == []
