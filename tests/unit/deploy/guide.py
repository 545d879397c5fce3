"""The GKE guide and its script, taken apart for test_guide.py and test_nodes.py."""

import re
import shlex
import subprocess
from collections.abc import Iterator

from tests.unit.deploy.images import ROOT

FOLDER = ROOT / "deploy" / "gke"
GUIDE = (FOLDER / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
SETTINGS = {"PROJECT": "p", "CLUSTER": "c", "LOCATION": "us-central1", "ZONE": "us-central1-c", "DRY_RUN": "1"}
PRESETS = {
    preset: (machine, topology, int(chips), int(hosts), workload)
    for preset, machine, topology, chips, hosts, workload in re.findall(
        r"^\| `([\w-]+)` \| `([\w-]+)` \| (\S+) \| (\d+) \| (\d+) \| (\w+) \|$", GUIDE, re.MULTILINE
    )
}
_INNER = re.compile(r"\$\(((?:[^()]|\([^()]*\))*)\)")
"""$(…), with parentheses of its own."""

GCLOUD = {
    "artifacts repositories create": {"--project", "--location", "--repository-format"},
    "artifacts repositories delete": {"--project", "--location", "--quiet"},
    "auth configure-docker": set(),
    "auth login": set(),
    "billing accounts list": set(),
    "billing projects link": {"--billing-account"},
    "compute machine-types list": {"--project", "--filter", "--format"},
    "compute resource-policies create workload-policy": {"--project", "--region", "--type", "--accelerator-topology"},
    "compute resource-policies delete": {"--project", "--region", "--quiet"},
    "container clusters create": {
        "--addons", "--enable-dataplane-v2", "--enable-ip-alias", "--location", "--machine-type", "--num-nodes",
        "--project", "--release-channel", "--workload-pool",
    },
    "container clusters delete": {"--project", "--location", "--quiet"},
    "container clusters get-credentials": {"--project", "--location"},
    "container node-pools create": {
        "--cluster", "--enable-autoscaling", "--enable-gvnic", "--enable-image-streaming", "--flex-start", "--location",
        "--machine-type", "--max-nodes", "--min-nodes", "--node-locations", "--num-nodes", "--placement-policy",
        "--project", "--reservation", "--reservation-affinity", "--spot",
    },
    "container node-pools delete": {"--project", "--cluster", "--location", "--quiet"},
    "container node-pools list": {"--project", "--cluster", "--location"},
    "projects add-iam-policy-binding": {"--role", "--member", "--condition"},
    "projects create": set(),
    "projects delete": set(),
    "projects describe": {"--format"},
    "quotas info list": {"--service", "--project", "--filter", "--format"},
    "services enable": {"--project"},
    "storage buckets add-iam-policy-binding": {"--role", "--member"},
    "storage buckets create": {"--project", "--location", "--uniform-bucket-level-access"},
    "storage cp": {"--recursive"},
    "storage rm": {"--recursive"},
    "version": set(),
}  # fmt: skip
"""The commands and flags in use, as the gcloud reference names them; a new one is looked up there first."""


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
