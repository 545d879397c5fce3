"""Which objects Kubernetes, and the operators the chart writes for, would take.

Built-in kinds: the strict schemas that kubernetes-validate ships, one set a Kubernetes version. Custom kinds: our own
small ones in schemas/, written from the public CRDs and closed: a field they do not name is an error. A kind without
a schema is an error too.
"""

import functools
import importlib.resources
import json
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
from jsonschema import Draft202012Validator
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY, SchemaRegistry

from tests.chart.manifest import Manifest

OLDEST = "1.30"
NEWEST: str = kubernetes_validate.latest_version().rpartition(".")[0]
VERSIONS = (OLDEST, NEWEST)

_OWN = Path(__file__).parent / "schemas"
_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"


@functools.cache
def problems(manifest: Manifest, version: str) -> tuple[str, ...]:
    """What the API server of this Kubernetes version would refuse; custom kinds are the same in all."""
    validator = _validator(manifest.api_version, manifest.kind, version)
    if validator is None:
        return (f"no schema for {manifest.api_version} {manifest.kind}",)
    found = [f"{'.'.join(map(str, one.absolute_path))}: {one.message}" for one in validator.iter_errors(manifest.tree)]
    return (*found, *(f"{path} is null" for path in _nulls(manifest.tree, "")))


def _nulls(value: object, path: str) -> Iterator[str]:
    """The strict schemas let null stand for "not given"; in a chart it is a template that found nothing."""
    if value is None:
        yield path
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _nulls(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _nulls(below, f"{path}[{index}]")


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator | None:
    group = api_version.rpartition("/")[0]
    # As in Kubernetes' own schema files: apps/v1 and rbac.authorization.k8s.io/v1 are apps-v1 and rbac-v1.
    flat = f"{group.partition('.')[0]}-{api_version.rpartition('/')[2]}" if group else api_version
    builtin = _kubernetes(version) / f"{kind.lower()}-{flat}.json"
    own = _own().get((api_version, kind))
    if own is not None:
        schema = own
    elif builtin.is_file():
        schema = json.loads(builtin.read_text())
    else:
        return None
    return Draft202012Validator(schema, registry=_registry(version))


@functools.cache
def _kubernetes(version: str) -> Path:
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    (found,) = Path(str(folder)).glob(f"v{version}.*-local-strict")
    return found


@functools.cache
def _registry(version: str) -> SchemaRegistry:
    definitions = json.loads((_kubernetes(version) / "_definitions.json").read_text())
    registry: SchemaRegistry = EMPTY_REGISTRY.with_resource(_DEFINITIONS, DRAFT202012.create_resource(definitions))
    return registry


@functools.cache
def _own() -> dict[tuple[str, str], dict[str, object]]:
    found = {}
    for path in _OWN.glob("*.json"):
        schema = json.loads(path.read_text())
        Draft202012Validator.check_schema(schema)
        properties = schema["properties"]
        found[properties["apiVersion"]["const"], properties["kind"]["const"]] = schema
    return found
