"""Renders helm/ostrya with the real Helm, offline, into parsed objects. Each distinct render is made once a session.

A refused render raises Refused with Helm's own message.
"""

import functools
import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import helm_python
import yaml

from tests.chart.manifest import Manifest, Tree, read

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "ostrya"
NAMESPACE = "serving"


class Refused(Exception):
    """The chart does not render with these values."""


class _Loader(yaml.CSafeLoader):
    """Like Helm's own reader, it takes no key twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [self.construct_object(key) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"keys given twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Render:
    """What one `helm install` would create, and with which values."""

    release: str
    values: Tree
    """Defaults and overrides together."""
    objects: tuple[Manifest, ...]

    def of(self, *kinds: str) -> tuple[Manifest, ...]:
        return tuple(one for one in self.objects if one.kind in kinds)

    def named(self, kind: str, name: str) -> Manifest:
        (found,) = [one for one in self.of(kind) if one.name == name]
        return found

    def has(self, kind: str, name: str) -> bool:
        return any(one.name == name for one in self.of(kind))


def value_files() -> dict[str, Path | None]:
    """Every values file the chart ships, by a short name; None stands for the defaults alone."""
    files = [*sorted(CHART.glob("values/*.yaml")), *sorted(CHART.glob("ci/*-values.yaml"))]
    return {"defaults": None} | {f"{one.parent.name}/{one.stem}": one for one in files}


# What a values file leaves to its user, and says so in its first lines.
LEFT_TO_THE_USER: dict[str, Tree] = {
    "values/tpu7x-16": {"pools": {"default": {"model": {"gcsFuse": {"bucket": "models"}}}}},
}


def overrides(name: str) -> Tree:
    """What a values file of value_files() says, together with what its user must say."""
    path = value_files()[name]
    return merged(_read_values(path) if path else {}, LEFT_TO_THE_USER.get(name, {}))


def preset(name: str, more: Tree | None = None, *, release: str = "ostrya") -> Render:
    """Of a values file of value_files(), with more on top as a second --values would be."""
    return render(merged(overrides(name), more or {}), release=release)


def render(values: Tree, *, release: str = "ostrya", namespace: str = NAMESPACE) -> Render:
    """Refused with Helm's message if the chart does not take the values."""
    return _render(json.dumps(values, sort_keys=True), release, namespace)


def merged(under: Mapping[str, object], over: Mapping[str, object]) -> Tree:
    """As Helm merges values files: mappings key by key, anything else is replaced."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def trees(text: str) -> Iterator[Tree]:
    """The objects of a rendered file. AssertionError on one that is no mapping."""
    for tree in yaml.load_all(text, Loader=_Loader):
        if tree is not None:
            assert isinstance(tree, dict), f"not an object: {tree!r}"
            yield tree


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def rendered_objects(
    loaded: helm_python.Chart, values: Tree, release: str, namespace: str = NAMESPACE
) -> tuple[Manifest, ...]:
    """Refused with Helm's message if the chart does not take the values."""
    try:
        files = loaded.render(values, name=release, namespace=namespace)
    except helm_python.HelmError as error:
        raise Refused(str(error)) from error
    shown = sorted(one for one in files.items() if not one[0].endswith("NOTES.txt"))
    return tuple(found for path, text in shown for found in _read_file(path, text))


@functools.cache
def _read_file(path: str, text: str) -> tuple[Manifest, ...]:
    """Most values change few files, and reading a dashboard takes as long as rendering it."""
    return tuple(read(path, tree) for tree in trees(text))


@functools.cache
def _read_values(path: Path) -> Tree:
    (values,) = trees(path.read_text())
    return values


@functools.cache
def _render(values: str, release: str, namespace: str) -> Render:
    given = json.loads(values)
    objects = rendered_objects(chart(), given, release, namespace)
    return Render(release=release, values=chart().merge_values(given), objects=objects)
