"""The packaged chart is the chart: it holds what templates read, renders the same, and fits into a release's Secret."""

import tarfile
from pathlib import Path

import helm_python
import pytest

from tests.chart.manifest import Tree
from tests.chart.render import CHART, overrides, rendered_objects

# Helm keeps the whole chart, packed, in the Secret of a release; Kubernetes takes 1 MiB.
MOST_BYTES = 512 * 1024


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(helm_python.package(CHART, destination=tmp_path_factory.mktemp("package")))


def test_it_holds_what_the_templates_read_and_nothing_of_the_tests(package: Path) -> None:
    with tarfile.open(package) as archive:
        names = {one.name.removeprefix("ostrya/") for one in archive.getmembers()}
        kinds = {one.type for one in archive.getmembers()}
    folder = CHART / "observability"
    observability = {
        str(one.relative_to(CHART)) for kind in ("dashboards", "rules") for one in (folder / kind).iterdir()
    }
    assert len(observability) > 5
    assert names >= observability
    assert names >= {"Chart.yaml", "README.md", "values.yaml", "values.schema.json", "values/v5e-8.yaml"}
    assert not [name for name in names if name.startswith("ci/")]
    # A link would point out of the package.
    assert kinds <= {tarfile.REGTYPE, tarfile.AREGTYPE}


@pytest.mark.parametrize("name", ["defaults", "values/tpu7x-16", "ci/prometheus-operator-values", "ci/gmp-values"])
def test_it_renders_as_the_folder_does(package: Path, name: str) -> None:
    values: Tree = overrides(name) | {"redis": {"bundled": {"existingSecret": "password"}}}
    with helm_python.Chart.load(package) as packed, helm_python.Chart.load(CHART) as folder:
        assert rendered_objects(packed, values, "ostrya") == rendered_objects(folder, values, "ostrya")


def test_it_fits_into_the_secret_of_a_release(package: Path) -> None:
    assert package.stat().st_size < MOST_BYTES
