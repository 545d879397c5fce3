"""What the guide's calls need and what they make: a small Google Cloud, cluster and image registry, as a set of facts.

`Cloud.see` takes one recorded call; AssertionError names the call whose prerequisite is not there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from tests.chart.manifest import Tree
from tests.chart.render import Render, merged, render
from tests.unit.deploy.guide import (
    ADDONS,
    APIS,
    GCLOUD,
    IMAGE_STREAMING_API,
    MONITORING_API,
    ZONES,
    flag_names,
    known_gcloud,
    set_values,
)
from tests.unit.deploy.images import ROOT
from tests.unit.deploy.rehearsal import PROJECT_NUMBER, Call

NEEDS_NO_CLUSTER = {("kubectl", "version"), ("helm", "version"), ("docker", "version"), ("docker", "build")}


@dataclass(slots=True)
class Cloud:
    facts: set[str] = field(default_factory=set)
    """As "cluster ostrya", "api compute.googleapis.com"."""
    values: dict[str, Tree] = field(default_factory=dict)
    """Of each release."""

    def see(self, call: Call) -> None:
        empty = [word for word in call.words if word in ("", "gs://", "ostrya-") or word.endswith("=")]
        # Helm's way to take a value away.
        assert set(empty) <= {"pools.default.model.huggingFace.id="}, f"{call}: names nothing"
        match call.program:
            case "gcloud":
                self._gcloud(call)
            case "kubectl":
                self._kubectl(call)
            case "docker":
                self._docker(call)
            case "helm":
                self._helm(call)
            case _:
                self._need(call, "forwarding")

    def what_costs(self) -> set[str]:
        kinds = ("cluster", "nodes", "bucket", "repository")
        return {one for one in self.facts if one.split()[0] in kinds}

    def _need(self, call: Call, *facts: str) -> None:
        missing = [fact for fact in facts if fact not in self.facts]
        assert not missing, f"{call}: there is no {missing[0]}"

    def _gcloud(self, call: Call) -> None:
        name = known_gcloud(list(call.words))
        assert flag_names(list(call.words)) <= GCLOUD[name], str(call)
        project, region = call.flag("--project"), call.flag("--region") or call.flag("--location")
        operand = (*[word for word in call.words[len(name.split()) :] if not word.startswith("-")], "")[0]
        if project:
            self._need(call, f"project {project}")
        for group, api in APIS.items():
            if name.startswith(f"{group} "):
                self._need(call, f"api {api}")
        match name:
            case "projects create":
                self.facts.add(f"project {operand}")
            case "projects delete":
                self._need(call, f"project {operand}")
                self.facts.clear()
            case "billing projects link":
                self._need(call, f"project {operand}")
                self.facts.add(f"billing {operand}")
            case "services enable":
                self._need(call, f"billing {project}")
                apis = {word for word in call.words[2:] if not word.startswith("-")}
                known = {*APIS.values(), IMAGE_STREAMING_API, MONITORING_API}
                assert apis <= known, f"{call}: no such API: {apis - known}"
                self.facts |= {f"api {one}" for one in apis}
            case "container clusters create":
                addons = set(call.flag("--addons").split(","))
                assert addons <= ADDONS, f"{call}: no such addon: {addons - ADDONS}"
                assert call.flag("--node-locations").startswith(f"{region}-")
                self.facts |= {f"cluster {operand} {region}", *(f"addon {one}" for one in addons)}
                self.facts |= {f"option {one}" for one in flag_names(list(call.words))}
            case "container clusters delete":
                self._need(call, f"cluster {operand} {region}")
                gone = ("cluster", "nodes", "namespace", "credentials", "addon", "option", "release")
                self.facts = {one for one in self.facts if one.split()[0] not in gone}
            case "container clusters get-credentials":
                self._need(call, f"cluster {operand} {region}")
                self.facts.add("credentials")
            case "container node-pools create":
                self._node_pool(call, operand)
            case "container node-pools delete":
                self._need(call, f"cluster {call.flag('--cluster')} {region}", f"nodes {operand}")
                self.facts.remove(f"nodes {operand}")
            case "container node-pools list":
                self._need(call, f"cluster {call.flag('--cluster')} {region}")
            case "compute resource-policies create workload-policy":
                self.facts.add(f"policy {operand} {region}")
            case "compute resource-policies delete":
                self.facts.discard(f"policy {operand} {region}")
            case "artifacts repositories create":
                self.facts.add(f"repository {region}-docker.pkg.dev/{project}/{operand}")
            case "artifacts repositories delete":
                self._need(call, f"repository {region}-docker.pkg.dev/{project}/{operand}")
                self.facts.remove(f"repository {region}-docker.pkg.dev/{project}/{operand}")
            case "auth configure-docker":
                self.facts.add(f"login {operand}")
            case "storage buckets create":
                self.facts.add(f"bucket {operand}")
            case "storage buckets add-iam-policy-binding":
                self._need(call, f"bucket {operand}")
                project = next(one.split()[1] for one in self.facts if one.startswith("project "))
                pool = f"projects/{PROJECT_NUMBER}/locations/global/workloadIdentityPools/{project}.svc.id.goog"
                member = call.flag("--member")
                assert member.startswith(f"principal://iam.googleapis.com/{pool}/subject/ns/"), member
                self.facts.add(f"reader {operand} {member.partition('/subject/')[2]}")
            case "storage cp":
                target = call.words[-1]
                bucket = "/".join(target.split("/")[:3])
                self._need(call, f"bucket {bucket}")
                self.facts.add(f"weights {target}")
            case "storage rm":
                self._need(call, f"bucket {operand}")
                self.facts.remove(f"bucket {operand}")

    def _node_pool(self, call: Call, name: str) -> None:
        location, zone = call.flag("--location"), call.flag("--node-locations")
        self._need(call, f"cluster {call.flag('--cluster')} {location}")
        machine = call.flag("--machine-type")
        assert zone in ZONES[machine.split("-")[0]], f"{call}: {zone} has no {machine}"
        assert zone.startswith(f"{location}-"), f"{call}: {zone} is not in {location}"
        if "--enable-image-streaming" in call.words:
            self._need(call, f"api {IMAGE_STREAMING_API}")
        if policy := call.flag("--placement-policy"):
            self._need(call, f"policy {policy} {location}")
        # They cost from now on: what takes long comes before.
        for kind in ("pushed", "weights"):
            assert [one for one in self.facts if one.startswith(f"{kind} ")], f"{call}: before what is {kind}"
        assert any("/worker-xla:" in one for one in self.facts if one.startswith("pushed ")), (
            f"{call}: there is no image for them"
        )
        self.facts.add(f"nodes {name}")

    def _docker(self, call: Call) -> None:
        if call.begins("build"):
            self.facts.add(f"image {call.flag('--tag')}")
        elif call.begins("push"):
            image = call.words[1]
            host, project, repository, *_ = image.split("/")
            self._need(call, f"image {image}", f"login {host}", f"repository {host}/{project}/{repository}")
            self.facts.add(f"pushed {image}")

    def _kubectl(self, call: Call) -> None:
        if ("kubectl", call.words[0]) in NEEDS_NO_CLUSTER:
            return
        self._need(call, "credentials")
        if call.begins("create", "namespace"):
            self.facts.add(f"namespace {call.words[2]}")
        elif call.begins("label", "namespace"):
            self._need(call, f"namespace {call.words[2]}")
            self.facts.add(f"label {call.words[2]} {call.words[3]}")
        elif call.begins("delete", "namespace"):
            self._need(call, f"namespace {call.words[2]}")
            self.facts.remove(f"namespace {call.words[2]}")
        elif call.begins("apply"):
            if "/lws/" in call.flag("--filename"):
                self.facts |= {"namespace lws-system", "controller LeaderWorkerSet"}
        elif namespace := call.flag("--namespace"):
            self._need(call, f"namespace {namespace}")
        if call.begins("port-forward"):
            self.facts.add("forwarding")

    def _helm(self, call: Call) -> None:
        if ("helm", call.words[0]) in NEEDS_NO_CLUSTER:
            return
        namespace, release = call.flag("--namespace"), call.words[1]
        self._need(call, "credentials", f"namespace {namespace}")
        if not call.begins("install"):
            self._need(call, f"release {release}")
        if call.begins("uninstall"):
            self.facts.remove(f"release {release}")
            return
        values: Tree = self.values.get(release, {}) if "--reuse-values" in call.words else {}
        for file in call.flags("--values"):
            values = merged(values, yaml.safe_load((ROOT / file).read_text()))
        for given in call.flags("--set"):
            values = merged(values, set_values(given))
        self._install(call, render(values, release=release, namespace=namespace), namespace)
        self.values[release] = values
        self.facts.add(f"release {release}")

    def _install(self, call: Call, rendered: Render, namespace: str) -> None:
        self._need(call, f"label {namespace} pod-security.kubernetes.io/enforce=restricted")
        ours = {one for one in _texts(rendered, "image") if "ostrya/" in one}
        assert ours
        self._need(call, *(f"pushed {one}" for one in sorted(ours)))
        if rendered.of("NetworkPolicy"):
            self._need(call, "option --enable-dataplane-v2")
        if rendered.of("PodMonitoring"):
            self._need(call, f"api {MONITORING_API}")
        if rendered.of("LeaderWorkerSet"):
            self._need(call, "controller LeaderWorkerSet")
        if any("google.com/tpu" in str(one.tree) for one in rendered.objects):
            assert [one for one in self.facts if one.startswith("nodes ")], f"{call}: there are no TPU nodes"
        for volume in _trees(rendered, "volumeAttributes"):
            bucket = f"gs://{volume['bucketName']}"
            self._need(call, f"bucket {bucket}", "addon GcsFuseCsiDriver", "option --workload-pool")
            for account in rendered.of("ServiceAccount"):
                if "redis" not in account.name:
                    self._need(call, f"reader {bucket} ns/{namespace}/sa/{account.name}")


def _texts(rendered: Render, key: str) -> Iterator[str]:
    return (str(value) for one in rendered.objects for value in _found(one.tree, key))


def _trees(rendered: Render, key: str) -> Iterator[Tree]:
    return (value for one in rendered.objects for value in _found(one.tree, key) if isinstance(value, dict))


def _found(value: object, key: str) -> Iterator[object]:
    """Everything under a key, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from _found(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _found(inner, key)
