"""values.yaml, values.schema.json and the README's table are one thing said three times."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator

import yaml

from tests.chart.manifest import Tree
from tests.chart.render import CHART, ROOT, trees

# Mappings whose keys nobody can list, each with why.
FREE = {
    "global": "Helm's own; the chart reads nothing of it",
    "labels": "keys of labels are the user's",
    "annotations": "keys of annotations are the user's",
    "quantities": "resource names are the cluster's",
    "affinity.nodeAffinity": "Kubernetes' own type, which Kubernetes checks",
    "affinity.podAffinity": "Kubernetes' own type, which Kubernetes checks",
    "affinity.podAntiAffinity": "Kubernetes' own type, which Kubernetes checks",
}


@functools.cache
def schema() -> Tree:
    read = json.loads((CHART / "values.schema.json").read_text())
    assert isinstance(read, dict)
    return read


def objects(node: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tree]]:
    """Every schema of a mapping, by the keys that lead to it."""
    if isinstance(node, list):
        for one in node:
            yield from objects(one, path)
    if not isinstance(node, dict):
        return
    if node.get("type") == "object" or "properties" in node:
        yield ".".join(path), node
    for keyword, below in node.items():
        if keyword in ("properties", "definitions", "$defs", "patternProperties"):
            for key, one in below.items():
                yield from objects(one, (*path, key))
        elif keyword in ("items", "anyOf", "oneOf", "allOf", "additionalProperties", "then", "else"):
            yield from objects(below, path)


def test_every_mapping_of_the_schema_is_closed() -> None:
    found = dict(objects(schema()))
    assert len(found) > 30
    open_ones = {path for path, node in found.items() if node.get("additionalProperties") is not False}
    assert open_ones == FREE.keys()


def test_free_mappings_with_text_say_so() -> None:
    found = dict(objects(schema()))
    for name in ("labels", "annotations"):
        values = found[name]["additionalProperties"]
        assert isinstance(values, dict)
        assert values["type"] == "string"


def resolved(node: object, root: Tree) -> Tree:
    assert isinstance(node, dict)
    if "$ref" not in node:
        return node
    target: object = root
    for key in str(node["$ref"]).removeprefix("#/").split("/"):
        assert isinstance(target, dict)
        target = target[key]
    return resolved(target, root)


def differences(values: object, node: object, root: Tree, path: str) -> Iterator[str]:
    """Keys that only one of the two has."""
    known = resolved(node, root)
    properties = known.get("properties")
    # {} stands for "as Kubernetes has it": affinity is not listed.
    if not isinstance(values, dict) or not isinstance(properties, dict) or not values:
        return
    yield from (f"{path}{key} is not in the schema" for key in values.keys() - properties.keys())
    yield from (f"{path}{key} has no default" for key in properties.keys() - values.keys())
    for key in values.keys() & properties.keys():
        yield from differences(values[key], properties[key], root, f"{path}{key}.")


@functools.cache
def defaults() -> Tree:
    (read,) = trees((CHART / "values.yaml").read_text())
    return read


def test_schema_and_defaults_have_the_same_keys() -> None:
    whole = schema()
    assert list(differences(defaults(), whole, whole, "")) == []


def test_a_pool_may_say_what_its_defaults_say() -> None:
    """poolDefaults and each pool are one schema, and router and a pool's router another."""
    whole = schema()
    pools = resolved(whole["properties"], whole)["pools"]
    assert isinstance(pools, dict)
    (pool,) = pools["patternProperties"].values()
    assert pool == resolved(whole["properties"], whole)["poolDefaults"]


def documented() -> dict[str, bool]:
    """Each value of values.yaml and whether a comment says what it does; what is under such a comment is one value."""
    text = (CHART / "values.yaml").read_text()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert root is not None
    return dict(_documented(root, text.splitlines(), ""))


def _documented(node: yaml.Node, lines: list[str], path: str) -> Iterator[tuple[str, bool]]:
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        has_comment = _has_comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and not has_comment:
            yield from _documented(value, lines, f"{path}{key.value}.")
        else:
            yield f"{path}{key.value}", has_comment


def _has_comment(lines: list[str], line: int) -> bool:
    """Whether the comment that ends above this line has a beginning."""
    while lines[line - 1].strip().startswith("#"):
        line -= 1
        if lines[line].strip().startswith("# -- "):
            return True
    return False


def test_every_value_is_documented() -> None:
    found = documented()
    assert len(found) > 150
    assert [path for path, has_comment in found.items() if not has_comment] == []


def test_the_table_in_the_readme_is_current() -> None:
    script = ROOT / "helm" / "values_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_value_is_in_the_readme() -> None:
    readme = (CHART / "README.md").read_text()
    assert [path for path in documented() if f"`{path}`" not in readme] == []
