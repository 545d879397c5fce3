"""Rendered objects, typed where the chart's tests look: this module has what all kinds share.

The parts are named as Kubernetes names them (snake for camel), with its defaults: podspec.py for pods, objects.py for
the specs of other kinds. Whether an object has fields that Kubernetes does not know is for schemas.py; here they are
ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")
Tree = dict[str, object]
"""A parsed mapping of a manifest."""


class Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Of an object; fields it does not name are ignored."""


class Meta(Part, frozen=True, kw_only=True):
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Requirement(Part, frozen=True, kw_only=True):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class Selector(Part, frozen=True, kw_only=True):
    """A label selector; an empty one selects everything."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        return self.match_labels.items() <= labels.items() and all(one.holds(labels) for one in self.match_expressions)

    @property
    def named(self) -> set[str]:
        """The labels it looks at."""
        return {*self.match_labels, *(one.key for one in self.match_expressions)}


class Selecting(Part, frozen=True, kw_only=True):
    """Any spec with a label selector."""

    selector: Selector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """One rendered object; equal to itself alone."""

    source: str
    """The template it comes from."""
    tree: Tree
    api_version: str
    kind: str
    metadata: Meta

    @property
    def name(self) -> str:
        return self.metadata.name

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    def spec(self, kind: type[T]) -> T:
        return msgspec.convert(self.tree["spec"], kind)

    def part(self, key: str, kind: type[T]) -> T:
        """A top-level key other than spec, such as a Role's rules."""
        return msgspec.convert(self.tree[key], kind)


def read(source: str, tree: Tree) -> Manifest:
    return Manifest(
        source=source,
        tree=tree,
        api_version=str(tree["apiVersion"]),
        kind=str(tree["kind"]),
        metadata=msgspec.convert(tree["metadata"], Meta),
    )
