"""Guide, script, presets and ComputeClasses say the same about each kind of slice."""

import re
import subprocess

import jsonschema
import pytest
import yaml

from tests.chart.render import CHART, render
from tests.unit.deploy.guide import FOLDER, GCLOUD, PRESETS, SETTINGS, flag_names, made_by_script, value

EVERY = pytest.mark.parametrize("preset", sorted(PRESETS))

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
            "required": ["priorities", "whenUnsatisfiable"],
            "properties": {
                "activeMigration": {"type": "object"},
                "nodePoolAutoCreation": {"type": "object", "required": ["enabled"]},
                "whenUnsatisfiable": {"enum": ["DoNotScaleUp", "ScaleUpAnyway"]},
                "priorities": {"type": "array", "minItems": 1, "items": RULE},
            },
        },
    },
}


def compute_classes() -> dict[str, list[dict[str, dict[str, object]]]]:
    """Name -> rules in order."""
    trees = list(yaml.safe_load_all((FOLDER / "compute-classes.yaml").read_text()))
    for tree in trees:
        jsonschema.validate(tree, CLASS)
    return {tree["metadata"]["name"]: tree["spec"]["priorities"] for tree in trees}


@EVERY
def test_the_table_the_script_the_preset_and_the_compute_class_agree(preset: str) -> None:
    machine, topology, chips, hosts, workload = PRESETS[preset]
    *before, made = made_by_script(preset)
    assert value(made, "--machine-type") == machine
    assert int(value(made, "--num-nodes")) == hosts
    if hosts > 1:
        (policy,) = before
        assert value(policy, "--accelerator-topology") == topology
        assert value(made, "--placement-policy") in policy
    rendered = render(yaml.safe_load((CHART / "values" / f"{preset}.yaml").read_text()))
    (workers,) = rendered.of(workload)
    text = str(workers.tree)
    assert f"'cloud.google.com/gke-tpu-topology': '{topology}'" in text
    assert f"'google.com/tpu': {chips // hosts}" in text or f"'google.com/tpu': '{chips // hosts}'" in text
    rule = compute_classes()[f"ostrya-{preset}"][0]
    assert rule["machineType"] == machine
    assert f"'gke-tpu-accelerator': '{rule['tpu']['type']}'" in text.replace("cloud.google.com/", "")
    assert (rule["tpu"]["count"], rule["tpu"]["topology"]) == (chips // hosts, topology)


@pytest.mark.parametrize(
    ("capacity", "flags"),
    [
        ("on-demand", set()),
        ("spot", {"--spot"}),
        ("reservation", {"--reservation", "--reservation-affinity"}),
        (
            "flex-start",
            {"--flex-start", "--reservation-affinity", "--enable-autoscaling", "--min-nodes", "--max-nodes"},
        ),
    ],
)
def test_capacity_chooses_its_flags(capacity: str, flags: set[str]) -> None:
    (plain,) = made_by_script("v6e-8")
    (made,) = made_by_script("v6e-8", CAPACITY=capacity, RESERVATION="r", SLICES="2")
    assert flag_names(made) - flag_names(plain) == flags
    assert flag_names(made) <= GCLOUD["container node-pools create"]
    assert value(made, "--max-nodes" if capacity == "flex-start" else "--num-nodes") == "2"


@pytest.mark.parametrize(("preset", "settings"), [("v9-1", SETTINGS), ("v6e-8", {"DRY_RUN": "1"})])
def test_the_script_says_what_is_missing(preset: str, settings: dict[str, str]) -> None:
    command = [str(FOLDER / "node-pools.sh"), preset]
    environment = {"PATH": "/usr/bin:/bin", **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "PROJECT" in done.stderr
    assert done.stdout == ""


def test_there_is_a_compute_class_for_each_preset() -> None:
    assert sorted(compute_classes()) == sorted(f"ostrya-{preset}" for preset in PRESETS)


@EVERY
def test_a_compute_class_tries_on_demand_then_flex_start_then_spot(preset: str) -> None:
    def kind(rule: dict[str, dict[str, object]]) -> str:
        return "flexStart" if "flexStart" in rule else "spot" if rule["spot"] else "on-demand"

    assert [kind(rule) for rule in compute_classes()[f"ostrya-{preset}"]] == ["on-demand", "flexStart", "spot"]


def test_a_reservation_that_is_uncommented_goes_first() -> None:
    text = (FOLDER / "compute-classes.yaml").read_text()
    opened = re.sub(r"^    # (- machineType|  tpu|  reservations)", r"    \1", text, flags=re.MULTILINE)
    for tree in yaml.safe_load_all(opened):
        first, second = tree["spec"]["priorities"][:2]
        assert first["reservations"]["specific"] == [{"name": "RESERVATION"}]
        assert first["tpu"] == second["tpu"]
