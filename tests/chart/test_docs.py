"""What the README of the chart, its NOTES and the guides say is so: examples render, named values and objects exist."""

import re

import pytest

from tests.chart.manifest import Tree
from tests.chart.render import CHART, NAMESPACE, ROOT, Refused, chart, overrides, preset, render, trees, value_files
from tests.chart.test_values import resolved, schema

README = CHART / "README.md"
KINDS = {
    "service": "Service",
    "deployment": "Deployment",
    "statefulset": "StatefulSet",
    "leaderworkerset": "LeaderWorkerSet",
}


def test_every_example_of_values_renders() -> None:
    examples = re.findall(r"^```yaml\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert examples
    for example in examples:
        (values,) = trees(example)
        assert render(values).objects


# What the README shows as refused -> what is said, as it stands there.
SHOWN: dict[str, Tree] = {
    'pools.chat.slice.topology is "4x5"': {
        "pools": {
            "chat": {
                "backend": "xla",
                "slice": {"generation": "v5e", "machineType": "ct5lp-hightpu-4t", "topology": "4x5"},
            }
        }
    },
    "pools.chat.engine.tensorParallel is 4": {
        "pools": {
            "chat": {
                "backend": "xla",
                "slice": {"generation": "v5e", "machineType": "ct5lp-hightpu-4t", "topology": "4x4"},
                "engine": {"tensorParallel": 4},
            }
        }
    },
}


@pytest.mark.parametrize("beginning", SHOWN)
def test_the_refusals_in_the_readme_are_the_charts_own(beginning: str) -> None:
    (line,) = [one for one in README.read_text().splitlines() if one.startswith(beginning)]
    with pytest.raises(Refused) as refused:
        render(SHOWN[beginning])
    assert str(refused.value).endswith(line)


def test_the_readme_names_every_preset() -> None:
    text = README.read_text()
    assert {name for name in value_files() if name.startswith("values/") and f"`{name}.yaml`" not in text} == set()


def test_every_value_that_a_guide_sets_exists() -> None:
    guides = [*CHART.rglob("*.md"), *CHART.glob("values/*.yaml"), *(ROOT / "deploy").rglob("*.md"), ROOT / "README.md"]
    found = {
        (str(guide.relative_to(ROOT)), path)
        for guide in guides
        for path in re.findall(r"--set(?:-string)?[ =]([A-Za-z][\w.-]*)=", guide.read_text())
    }
    assert found
    assert {(guide, path) for guide, path in found if not is_value(path)} == set()


def test_every_rollback_that_a_guide_recommends_gets_past_a_number_of_pods_that_somebody_else_changed() -> None:
    guides = [*CHART.rglob("*.md"), *(ROOT / "deploy").rglob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = {(one.name, words) for one in guides for words in re.findall(r"`(helm rollback .*?)`", one.read_text())}
    assert len(found) >= 4
    assert [(name, words) for name, words in found if "--force-conflicts" not in words] == []


def is_value(path: str) -> bool:
    root = schema()
    node: Tree = root
    for key in path.split("."):
        properties = node.get("properties")
        patterns = node.get("patternProperties")
        if isinstance(properties, dict) and key in properties:
            node = resolved(properties[key], root)
        elif isinstance(patterns, dict):
            (below,) = patterns.values()
            node = resolved(below, root)
        else:
            return False
    return True


@pytest.mark.parametrize("name", list(value_files()))
def test_the_notes_name_objects_that_exist(name: str) -> None:
    shown = preset(name)
    notes = chart().render(overrides(name), name=shown.release, namespace=NAMESPACE)["ostrya/templates/NOTES.txt"]
    named = re.findall(r"\b(service|deployment|statefulset|leaderworkerset)/([-a-z0-9]+)", notes)
    assert {kind for kind, _ in named} >= {"service", "deployment"}
    assert [one for one in named if not shown.has(KINDS[one[0]], one[1])] == []
    assert f"--namespace {NAMESPACE}" in notes
    assert "<no value>" not in notes
    assert "%!" not in notes
