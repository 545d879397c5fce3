"""Guide, script, presets and ComputeClasses say the same about each kind of slice."""

import re
import subprocess
from typing import TypedDict

import jsonschema
import pytest
import yaml

from tests.chart.render import CHART, merged, render
from tests.unit.deploy.guide import FOLDER, GCLOUD, PRESETS, SETTINGS, ZONES, flag_names, made_by_script, value

EVERY = pytest.mark.parametrize("preset", sorted(PRESETS))


class Rule(TypedDict, total=False):
    """One of a ComputeClass; RULE says which fields must be there."""

    machineType: str
    tpu: dict[str, object]
    placement: dict[str, str]
    flexStart: dict[str, object]
    spot: bool


class ClassSpec(TypedDict):
    priorities: list[Rule]
    priorityDefaults: dict[str, object]


class ClassTree(TypedDict):
    """The parts of a ComputeClass that the tests look at."""

    metadata: dict[str, str]
    spec: ClassSpec


RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["machineType", "tpu"],
    "properties": {
        "machineType": {"type": "string"},
        "tpu": {
            "type": "object",
            "additionalProperties": False,
            "required": ["type", "count", "topology"],
            "properties": {"type": {"type": "string"}, "count": {"type": "integer"}, "topology": {"type": "string"}},
        },
        "placement": {"type": "object", "required": ["policyName"]},
        "spot": {"type": "boolean"},
        "flexStart": {"type": "object", "required": ["enabled"]},
        "maxRunDurationSeconds": {"type": "integer", "minimum": 60},
    },
}
"""Fields of the CRD that our classes use (docs.cloud.google.com/kubernetes-engine/docs/reference/crds/computeclass)."""
CLASS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "cloud.google.com/v1"},
        "kind": {"const": "ComputeClass"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["priorities", "priorityDefaults", "whenUnsatisfiable"],
            "properties": {
                "activeMigration": {"type": "object"},
                "nodePoolAutoCreation": {"type": "object", "required": ["enabled"]},
                "whenUnsatisfiable": {"enum": ["DoNotScaleUp", "ScaleUpAnyway"]},
                "priorityDefaults": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["location"],
                    "properties": {"location": {"type": "object", "required": ["zones"]}},
                },
                "priorities": {"type": "array", "minItems": 1, "items": RULE},
            },
        },
    },
}


def class_trees() -> list[ClassTree]:
    trees: list[ClassTree] = list(yaml.safe_load_all((FOLDER / "compute-classes.yaml").read_text()))
    for tree in trees:
        jsonschema.validate(tree, CLASS)
    return trees


def compute_classes() -> dict[str, list[Rule]]:
    """Name -> rules in order."""
    return {tree["metadata"]["name"]: tree["spec"]["priorities"] for tree in class_trees()}


@EVERY
def test_the_table_the_script_the_preset_and_the_compute_class_agree(preset: str) -> None:
    row = PRESETS[preset]
    *before, made = made_by_script(preset)
    assert value(made, "--machine-type") == row.machine
    assert int(value(made, "--num-nodes")) == row.hosts
    if row.hosts > 1:
        (policy,) = before
        assert value(policy, "--accelerator-topology") == row.topology
        assert value(made, "--placement-policy") in policy
    # A preset that reads from a bucket has none of its own: the guide's step 14 names it.
    bucket = {"pools": {"default": {"model": {"gcsFuse": {"bucket": "models"}}}}} if row.hosts > 1 else {}
    rendered = render(merged(yaml.safe_load((CHART / "values" / f"{preset}.yaml").read_text()), bucket))
    (workers,) = rendered.of(row.workload)
    text = str(workers.tree)
    chips = row.chips // row.hosts
    assert f"'cloud.google.com/gke-tpu-topology': '{row.topology}'" in text
    assert f"'google.com/tpu': {chips}" in text or f"'google.com/tpu': '{chips}'" in text
    rule = compute_classes()[f"ostrya-{preset}"][0]
    assert rule["machineType"] == row.machine
    assert f"'gke-tpu-accelerator': '{rule['tpu']['type']}'" in text.replace("cloud.google.com/", "")
    assert (rule["tpu"]["count"], rule["tpu"]["topology"]) == (chips, row.topology)


@EVERY
def test_a_zone_has_the_machines_that_are_asked_of_it(preset: str) -> None:
    row = PRESETS[preset]
    assert row.zone in ZONES[row.machine.split("-")[0]]
    (tree,) = [one for one in class_trees() if one["metadata"]["name"] == f"ostrya-{preset}"]
    assert tree["spec"]["priorityDefaults"] == {"location": {"zones": [row.zone]}}


@pytest.mark.parametrize(
    ("capacity", "flags"),
    [
        ("on-demand", set()),
        ("spot", {"--spot"}),
        ("reservation", {"--reservation", "--reservation-affinity"}),
        # As xpk has them: src/xpk/core/capacity.py.
        (
            "flex-start",
            {
                "--flex-start",
                "--enable-autoscaling",
                "--location-policy",
                "--reservation-affinity",
                "--no-enable-autorepair",
                "--max-nodes",
            },
        ),
    ],
)
def test_capacity_chooses_its_flags(capacity: str, flags: set[str]) -> None:
    (plain,) = made_by_script("v6e-8")
    (made,) = made_by_script("v6e-8", CAPACITY=capacity, RESERVATION="r", SLICES="2")
    assert flag_names(made) - flag_names(plain) == flags
    assert flag_names(made) <= GCLOUD["container node-pools create"]
    assert value(made, "--max-nodes" if capacity == "flex-start" else "--num-nodes") == "2"


def test_flex_start_has_no_nodes_until_a_pod_asks_for_a_slice() -> None:
    *_, made = made_by_script("tpu7x-16", CAPACITY="flex-start")
    assert (value(made, "--num-nodes"), value(made, "--max-nodes")) == ("0", "4")
    assert (value(made, "--location-policy"), value(made, "--reservation-affinity")) == ("ANY", "none")


def test_each_slice_of_several_hosts_is_a_pool_and_all_share_the_policy() -> None:
    policy, *made = made_by_script("tpu7x-16", SLICES="3")
    assert "create" in policy
    assert [one[4] for one in made] == ["ostrya-tpu7x-16", "ostrya-tpu7x-16-2", "ostrya-tpu7x-16-3"]
    assert {value(one, "--num-nodes") for one in made} == {"4"}
    assert {value(one, "--placement-policy") for one in made} == {"ostrya-2x2x4"}


def test_the_policy_can_be_had_alone_and_has_the_name_that_the_compute_class_uses() -> None:
    (policy,) = made_by_script("tpu7x-16", POLICY_ONLY="1")
    (name,) = {rule["placement"]["policyName"] for rule in compute_classes()["ostrya-tpu7x-16"] if "placement" in rule}
    assert policy[:6] == ["gcloud", "compute", "resource-policies", "create", "workload-policy", name]


@pytest.mark.parametrize(
    ("preset", "settings", "says"),
    [
        ("v9-1", SETTINGS, "PROJECT"),
        ("v6e-8", {"DRY_RUN": "1"}, "PROJECT"),
        ("v6e-8", {**SETTINGS, "SLICES": "0"}, "SLICES is '0'"),
        ("v6e-8", {**SETTINGS, "POLICY_ONLY": "1"}, "v6e-8 has one host"),
        ("v6e-8", {**SETTINGS, "CAPACITY": "free"}, "CAPACITY"),
        ("v6e-8", {**SETTINGS, "CAPACITY": "reservation"}, "set RESERVATION"),
    ],
)
def test_the_script_says_what_is_missing(preset: str, settings: dict[str, str], says: str) -> None:
    command = [str(FOLDER / "node-pools.sh"), preset]
    environment = {"PATH": "/usr/bin:/bin", **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert says in done.stderr
    assert done.stdout == ""


def test_there_is_a_compute_class_for_each_preset() -> None:
    assert sorted(compute_classes()) == sorted(f"ostrya-{preset}" for preset in PRESETS)


@EVERY
def test_a_compute_class_tries_on_demand_then_flex_start_then_spot(preset: str) -> None:
    def kind(rule: Rule) -> str:
        return "flexStart" if "flexStart" in rule else "spot" if rule["spot"] else "on-demand"

    assert [kind(rule) for rule in compute_classes()[f"ostrya-{preset}"]] == ["on-demand", "flexStart", "spot"]


def test_a_reservation_that_is_uncommented_goes_first() -> None:
    text = (FOLDER / "compute-classes.yaml").read_text()
    opened = re.sub(r"^    # (- machineType|  tpu|  reservations)", r"    \1", text, flags=re.MULTILINE)
    for tree in yaml.safe_load_all(opened):
        first, second = tree["spec"]["priorities"][:2]
        assert first["reservations"]["specific"] == [{"name": "RESERVATION"}]
        assert first["tpu"] == second["tpu"]
