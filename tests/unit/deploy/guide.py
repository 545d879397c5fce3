"""The GKE guide and its script, taken apart for test_guide.py and test_nodes.py."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.unit.deploy.images import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Of the table of presets in step 9."""

    machine: str
    topology: str
    chips: int
    hosts: int
    workload: str
    zone: str


FOLDER = ROOT / "deploy" / "gke"
GUIDE = (FOLDER / "README.md").read_text()


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


BLOCKS = _blocks(GUIDE)
SETTINGS = {"PROJECT": "p", "CLUSTER": "c", "LOCATION": "us-central1", "ZONE": "us-central1-c", "DRY_RUN": "1"}
PRESETS = {
    preset: Row(machine=machine, topology=topology, chips=int(chips), hosts=int(hosts), workload=workload, zone=zone)
    for preset, machine, topology, chips, hosts, workload, zone in re.findall(
        r"^\| `([\w-]+)` \| `([\w-]+)` \| (\S+) \| (\d+) \| (\d+) \| (\w+) \| `([\w-]+)` \|$", GUIDE, re.MULTILINE
    )
}
_INNER = re.compile(r"\$\(((?:[^()]|\([^()]*\))*)\)")
"""$(…), with parentheses of its own."""

GCLOUD = {
    "artifacts repositories create": {"--project", "--location", "--repository-format"},
    "artifacts repositories delete": {"--project", "--location", "--quiet"},
    "auth configure-docker": set(),
    "auth login": set(),
    "beta quotas info list": {"--service", "--project", "--filter", "--flatten", "--format"},
    "billing accounts list": set(),
    "billing projects link": {"--billing-account"},
    "compute machine-types list": {"--project", "--filter", "--format"},
    "compute resource-policies create workload-policy": {"--project", "--region", "--type", "--accelerator-topology"},
    "compute resource-policies delete": {"--project", "--region", "--quiet"},
    "compute resource-policies describe": {"--project", "--region"},
    "container clusters create": {
        "--addons", "--enable-dataplane-v2", "--enable-ip-alias", "--location", "--machine-type",
        "--node-locations", "--num-nodes", "--project", "--release-channel", "--workload-pool",
    },
    "container clusters delete": {"--project", "--location", "--quiet"},
    "container clusters get-credentials": {"--project", "--location"},
    "container node-pools create": {
        "--cluster", "--enable-autoscaling", "--enable-gvnic", "--enable-image-streaming", "--flex-start", "--location",
        "--location-policy", "--machine-type", "--max-nodes", "--no-enable-autorepair", "--node-locations",
        "--num-nodes", "--placement-policy", "--project", "--reservation", "--reservation-affinity", "--spot",
    },
    "container node-pools delete": {"--project", "--cluster", "--location", "--quiet"},
    "container node-pools list": {"--project", "--cluster", "--location", "--filter", "--format"},
    "projects add-iam-policy-binding": {"--role", "--member", "--condition"},
    "projects create": set(),
    "projects delete": set(),
    "projects describe": {"--format"},
    "services enable": {"--project"},
    "storage buckets add-iam-policy-binding": {"--role", "--member"},
    "storage buckets create": {"--project", "--location", "--uniform-bucket-level-access"},
    "storage cp": {"--recursive"},
    "storage rm": {"--recursive"},
    "version": set(),
}  # fmt: skip
"""The commands and flags in use, as the gcloud reference names them; a new one is looked up there first. Also held
against the table of commands in gcloud 528.0.0 (data/cli/gcloud_completions.py), which lacks `beta`."""
ADDONS = {
    "BackupRestore", "ConfigConnector", "GcePersistentDiskCsiDriver", "GcpFilestoreCsiDriver", "GcsFuseCsiDriver",
    "HighScaleCheckpointing", "HorizontalPodAutoscaling", "HttpLoadBalancing", "KubernetesDashboard",
    "LustreCsiDriver", "NetworkPolicy", "NodeLocalDNS", "ParallelstoreCsiDriver", "RayOperator", "StatefulHA",
}  # fmt: skip
"""What `container clusters create --addons` takes: ADDONS_OPTIONS of gcloud 528.0.0 (container/api_adapter.py)."""
APIS = {
    "artifacts": "artifactregistry.googleapis.com",
    "beta quotas": "cloudquotas.googleapis.com",
    "compute": "compute.googleapis.com",
    "container": "container.googleapis.com",
    "storage": "storage.googleapis.com",
}
"""The service behind a group of commands (REST reference of each, "Service: …"); gcloud asks for it if it is not on."""
IMAGE_STREAMING_API = "containerfilesystem.googleapis.com"
"""docs.cloud.google.com/kubernetes-engine/docs/how-to/image-streaming, "Requirements"."""
MONITORING_API = "monitoring.googleapis.com"
ZONES = {
    "ct5lp": {"us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a"},
    "ct5p": {"us-central1-a", "us-east5-a"},
    "ct6e": {"us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b"},
    "tpu7x": {"us-central1-c"},
}
"""First part of a machine type -> zones in the USA (docs.cloud.google.com/tpu/docs/regions-zones)."""


def commands(program: str) -> Iterator[list[str]]:
    """Every call of `program` in the guide, as words; variables stay as they are written."""
    for block in BLOCKS:
        for line in block.replace("\\\n", " ").splitlines():
            # $(…) holds a command of its own.
            for part in [line, *_INNER.findall(line)]:
                words = shlex.split(_INNER.sub("VALUE", part))
                for position, word in enumerate(words):
                    if word == program or word.endswith(f"/{program}"):
                        yield [one for one in words[position + 1 :] if one not in ("&", "|")]


def flag_names(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def blocks(title: str, end: str) -> list[str]:
    """The shell blocks from one heading to another."""
    return _blocks(GUIDE[GUIDE.index(f"\n## {title}") : GUIDE.index(f"\n## {end}")])


def made_by_script(preset: str, **settings: str) -> list[list[str]]:
    """The commands that node-pools.sh would run."""
    environment = {"PATH": "/usr/bin:/bin", **SETTINGS, **settings}
    command = [str(FOLDER / "node-pools.sh"), preset]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def value(words: list[str], name: str) -> str:
    (found,) = [one.partition("=")[2] for one in words if one.partition("=")[0] == name]
    return found


def known_gcloud(words: list[str]) -> str:
    """The command that the words begin with. AssertionError if it is none of GCLOUD."""
    text = " ".join(words)
    found = [name for name in GCLOUD if text == name or text.startswith(f"{name} ")]
    assert found, f"gcloud {text}"
    return max(found, key=len)


def value_after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def set_values(text: str) -> dict[str, object]:
    """What Helm makes of --set a.b=c."""
    key, _, given = text.partition("=")
    tree: object = int(given) if given.isdigit() else {"true": True, "false": False}.get(given, given)
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return tree
