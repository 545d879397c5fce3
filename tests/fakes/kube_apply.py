"""A Kubernetes API server on a free port of 127.0.0.1, as far as Helm goes: discovery, objects, server-side apply.

Who owns a field is kept as Kubernetes does, with lists whole: an apply that changes another's field conflicts unless it
forces, what an applier applies no more goes unless another owns it, and replicas that nobody sets are 1. No schema, no
admission. `with KubeApply() as cluster` serves.
"""

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.fakes.kube_http import Handler, HttpServer

Object: TypeAlias = dict[str, object]
Path: TypeAlias = tuple[str, ...]

KINDS = {
    "v1": {"services": "Service", "secrets": "Secret", "configmaps": "ConfigMap", "serviceaccounts": "ServiceAccount"},
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
    "scheduling.k8s.io/v1": {"priorityclasses": "PriorityClass"},
}
_CLUSTER_WIDE = {"PriorityClass"}
_UNOWNED = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")}
_REPLICAS = ("spec", "replicas")
# Without schemas a client checks nothing; it insists on the header.
_NO_SCHEMAS = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


class Owner(NamedTuple):
    manager: str
    operation: str
    subresource: str = ""


@dataclass(slots=True)
class _Stored:
    body: Object
    owners: dict[Owner, set[Path]] = field(default_factory=dict)

    def others(self, owner: Owner, path: Path) -> list[Owner]:
        return [one for one, paths in self.owners.items() if one != owner and path in paths]

    def take(self, owner: Owner, path: Path, value: object) -> None:
        """Sets a field; who had set it to another value has it no more."""
        if _get(self.body, path) != value:
            for paths in self.owners.values():
                paths.discard(path)
        _set(self.body, path, value)
        self.owners.setdefault(owner, set()).add(path)


class KubeApply:
    """Methods may be called while it serves, from the test's thread."""

    def __init__(self) -> None:
        self.num_applied = 0
        """Requests that changed something."""
        self._objects: dict[str, _Stored] = {}
        self._lock = threading.Lock()
        self._server = HttpServer(("127.0.0.1", 0), self._answer, tls=None)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "KubeApply":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, path: str, body: Object) -> None:
        """As it is, managedFields too."""
        with self._lock:
            self._objects[path] = _Stored(body)

    def get(self, path: str) -> Object | None:
        with self._lock:
            found = self._objects.get(path)
            return _shown(found) if found is not None else None

    def scale(self, path: str, replicas: int, manager: str = "kube-controller-manager") -> None:
        """As an autoscaler or `kubectl scale` does."""
        with self._lock:
            self._objects[path].take(Owner(manager, "Update", "scale"), _REPLICAS, replicas)

    # ------------------------------------------------------------------------------------------------------------

    def _answer(self, handler: Handler) -> None:
        parts = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length") or 0)
        body = cast("Object", yaml.safe_load(handler.rfile.read(length)) or {}) if length else {}
        if parts.path == "/openapi/v2":
            handler.send_response(200)
            handler.send_header("Content-Type", _NO_SCHEMAS)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        with self._lock:
            known = _discovery().get(parts.path)
            if handler.command == "PATCH":
                status, answer = self._apply(parts.path, body, parse_qs(parts.query))
            elif handler.command == "DELETE" and self._objects.pop(parts.path, None) is not None:
                self.num_applied += 1
                status, answer = 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            elif known is None and parts.path in self._objects:
                status, answer = 200, _shown(self._objects[parts.path])
            else:
                status, answer = (200, known) if known is not None else (404, _refusal(404, "NotFound", "not found"))
        handler.send_json(status, answer)

    def _apply(self, path: str, body: Object, query: Mapping[str, list[str]]) -> tuple[int, Object]:
        owner = Owner(query["fieldManager"][0], "Apply")
        stored = self._objects.get(path) or _Stored({})
        wanted = {one: value for one, value in _leaves(body) if one not in _UNOWNED}
        conflicts = [
            f'conflict with "{other.manager}": .{".".join(one)}'
            for one, value in wanted.items()
            for other in stored.others(owner, one)
            if _get(stored.body, one) != value
        ]
        if conflicts and query.get("force") != ["true"]:
            words = f"Apply failed with {len(conflicts)} conflict: {'; '.join(conflicts)}"
            return 409, _refusal(409, "Conflict", words)
        for gone in stored.owners.get(owner, set()) - wanted.keys():
            stored.owners[owner].discard(gone)
            if not stored.others(owner, gone):
                _remove(stored.body, gone)
        for one in _UNOWNED:
            _set(stored.body, one, _get(body, one))
        for one, value in wanted.items():
            stored.take(owner, one, value)
        if body["kind"] in KINDS["apps/v1"].values() and _get(stored.body, _REPLICAS) is None:
            _set(stored.body, _REPLICAS, 1)
        self._objects[path] = stored
        self.num_applied += 1
        return 200, _shown(stored)


def _discovery() -> dict[str, Object]:
    found: dict[str, Object] = {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    }
    groups = []
    for version, kinds in KINDS.items():
        group, _, number = version.rpartition("/")
        if group:
            of = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [of], "preferredVersion": of})
        resources = [
            {"name": name, "kind": kind, "namespaced": kind not in _CLUSTER_WIDE, "verbs": ["get", "patch", "delete"]}
            for name, kind in kinds.items()
        ]
        listed: Object = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": resources,
        }
        found[f"/{'apis' if group else 'api'}/{version}"] = listed
    return found | {"/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}}


def _shown(stored: _Stored) -> Object:
    body = cast("Object", json.loads(json.dumps(stored.body)))
    if stored.owners:
        _set(body, ("metadata", "managedFields"), [_entry(owner, paths) for owner, paths in stored.owners.items()])
    return body


def _entry(owner: Owner, paths: set[Path]) -> Object:
    fields: Object = {}
    for path in sorted(paths):
        _set(fields, tuple(f"f:{key}" for key in path), {})
    entry: Object = {"manager": owner.manager, "operation": owner.operation, "fieldsType": "FieldsV1"}
    return entry | {"fieldsV1": fields} | ({"subresource": owner.subresource} if owner.subresource else {})


def _refusal(code: int, reason: str, message: str) -> Object:
    status: Object = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return status | {"code": code, "reason": reason, "message": message}


def _leaves(body: Mapping[str, object], under: Path = ()) -> Iterator[tuple[Path, object]]:
    for key, value in body.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*under, key))
        else:
            yield (*under, key), value


def _get(body: Mapping[str, object], path: Path) -> object:
    at: object = body
    for key in path:
        at = at.get(key) if isinstance(at, dict) else None
    return at


def _set(body: Object, path: Path, value: object) -> None:
    for key in path[:-1]:
        below = body.setdefault(key, {})
        assert isinstance(below, dict)
        body = below
    body[path[-1]] = copy.deepcopy(value)


def _remove(body: Object, path: Path) -> None:
    for key in path[:-1]:
        below = body.get(key)
        if not isinstance(below, dict):
            return
        body = below
    body.pop(path[-1], None)
