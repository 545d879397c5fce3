"""Values that are allowed and awkward: text that YAML takes for something else, limits of ranges, odd release names."""

from collections.abc import Iterator

import pytest

from tests.chart.commands import check_config, command_of
from tests.chart.manifest import Tree
from tests.chart.pods import pods
from tests.chart.render import Refused, Render, merged, render
from tests.chart.schemas import NEWEST, problems
from tests.chart.test_references import SERVICE_NAME, assert_unique_names, assert_well_named
from tests.chart.test_values import resolved, schema


def assert_sound(shown: Render) -> None:
    """Kubernetes takes it, and so does `ostrya`."""
    assert {str(one): wrong for one in shown.objects if (wrong := problems(one, NEWEST))} == {}
    for pod in pods(shown):
        for container in pod.spec.containers:
            if pod.component in ("router", "worker"):
                code, said = check_config(command_of(shown, pod, container))
                assert code == 0, f"{pod}: {said}"


# Each is a string for the schema; without quotes YAML would read a number, a boolean or nothing.
LOOKS_LIKE_SOMETHING_ELSE: dict[str, Tree] = {
    "names": {
        "image": {"registry": "1.10", "tag": "1.10", "pullSecrets": ["123"]},
        "priorityClass": {"name": "123"},
        "commonLabels": {"team": "7", "on-call": "true"},
        "commonAnnotations": {"cost": "1e3"},
        "redis": {"bundled": {"existingSecret": "123", "passwordKey": "0123"}},
        "pools": {
            "default": {
                "serviceAccount": {"create": False, "name": "123"},
                "router": {"serviceAccount": {"create": False, "name": "1e3"}, "podLabels": {"tier": "1"}},
                "podLabels": {"tier": "null"},
                "podAnnotations": {"size": "10"},
                "nodeSelector": {"disk": "true"},
                "tolerations": [{"key": "on", "value": "1", "effect": "NoSchedule"}],
                "kueueQueue": "123",
                "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "2"}],
                "compileCache": {"type": "pvc", "claimName": "123"},
                "model": {"name": "405", "source": "pvc", "pvc": {"claimName": "42", "path": "1.0"}},
            }
        },
        "discovery": "kubernetes",
        "monitoring": {
            "provider": "prometheus-operator",
            "labels": {"release": "1"},
            "dashboards": {"labelValue": "1"},
        },
    },
    "external Redis": {
        "redis": {
            "mode": "external",
            "external": {
                "url": "rediss://redis.example:6380/0",
                "username": "123",
                "existingSecret": "123",
                "passwordKey": "123",
                "caSecret": "123",
                "caKey": "123",
            },
        }
    },
    "hub and class": {
        "pools": {
            "default": {
                "backend": "xla",
                "slice": {"generation": "v6e", "machineType": "ct6e-standard-8t", "topology": "2x4"},
                "computeClass": "123",
                "model": {
                    "source": "huggingFace",
                    "huggingFace": {"id": "1/2", "revision": "123", "tokenSecret": "123", "tokenKey": "123"},
                },
                "autoscaling": {"type": "keda", "kedaServerAddress": "http://p:9090", "kedaAuthentication": "123"},
            }
        }
    },
    "bucket": {
        "pools": {"default": {"model": {"source": "gcsFuse", "gcsFuse": {"bucket": "123", "path": "1"}}}},
        "monitoring": {"provider": "gmp"},
    },
    "pools": {"pools": {"default": None, "on": {}, "true": {"replicas": 1}, "null": {}, "e1": {}}},
}


@pytest.mark.parametrize("what", LOOKS_LIKE_SOMETHING_ELSE)
def test_text_stays_text(what: str) -> None:
    assert_sound(render(LOOKS_LIKE_SOMETHING_ELSE[what]))


@pytest.mark.parametrize("release", ["123", "1e3", "true", "null", "7b", "a.b", "x" * 53, "on-ostrya-off"])
def test_an_odd_release_name_gives_valid_objects(release: str) -> None:
    shown = render({"discovery": "kubernetes", "monitoring": {"provider": "prometheus-operator"}}, release=release)
    assert_sound(shown)
    assert_well_named(shown)
    assert_unique_names(shown)
    for service in shown.of("Service"):
        assert SERVICE_NAME.fullmatch(service.name), f"{service} must begin with a letter and hold no dot"


def limits(node: object, root: Tree, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """(path, value) of each number at either end of its range, and each choice of an enumeration."""
    known = resolved(node, root)
    for key, below in known.get("properties", {}).items():  # type: ignore[attr-defined]
        yield from limits(below, root, (*path, key))
    yield from ((path, known[end]) for end in ("minimum", "maximum") if end in known)
    yield from ((path, choice) for choice in known.get("enum", []))  # type: ignore[attr-defined]


def all_limits() -> dict[str, Tree]:
    root = schema()
    properties = resolved(root["properties"], root)
    found: dict[str, Tree] = {}
    for key, path in (
        ("poolDefaults", ("pools", "default")),
        ("router", ("router",)),
        ("maintenance", ("maintenance",)),
    ):
        for where, value in limits(properties[key], root, path):
            found[f"{'.'.join(where)}={value}"] = nested(where, value)
    return found


def nested(path: tuple[str, ...], value: object) -> Tree:
    first, *rest = path
    return {first: nested(tuple(rest), value) if rest else value}


# The password is given: one that each render makes anew changes every pod, and what is the same is looked at once.
PLAIN: Tree = {
    "redis": {"bundled": {"existingSecret": "redis"}},
    "discovery": "kubernetes",
    "maintenance": {"enabled": True},
    "monitoring": {"dashboards": {"enabled": False}},
    "networkPolicy": {"enabled": False},
}


def test_what_the_schema_lets_pass_the_command_lets_pass() -> None:
    found = all_limits()
    assert len(found) > 60
    shown = 0
    for values in found.values():
        try:
            rendered = render(merged(PLAIN, values))
        except Refused:
            # A choice that needs more, such as a model source without its place: a sentence of the chart's own.
            continue
        assert_sound(rendered)
        shown += 1
    assert shown > 50
