"""What the chart knows of TPUs is true: each slice of tpus.py renders to its chips and hosts, and no other does."""

import math
from pathlib import Path

import pytest

from tests.chart.commands import command_of, options
from tests.chart.manifest import Tree
from tests.chart.objects import LeaderWorkerSetSpec
from tests.chart.pods import pods
from tests.chart.render import Refused, Render, preset, render
from tests.chart.test_pods import amount
from tests.chart.tpus import BFLOAT16_BYTES, HBM_GB, MACHINES, MODELS, SLICES, Slice

PRESETS = {
    "values/v5e-1": ("ct5lp-hightpu-1t", "1x1"),
    "values/v5e-8": ("ct5lp-hightpu-8t", "2x4"),
    "values/v6e-1": ("ct6e-standard-1t", "1x1"),
    "values/v6e-8": ("ct6e-standard-8t", "2x4"),
    "values/v5p-4": ("ct5p-hightpu-4t", "2x2x1"),
    "values/tpu7x-4": ("tpu7x-standard-4t", "2x2x1"),
    "values/tpu7x-16": ("tpu7x-standard-4t", "2x2x4"),
}


def values(generation: str, machine_type: str, topology: str, *, backend: str = "torchtpu") -> Tree:
    slice_values = {"generation": generation, "machineType": machine_type, "topology": topology}
    return {"pools": {"default": {"backend": backend, "slice": slice_values}}}


def assert_runs_on(rendered: Render, expected: Slice) -> None:
    workers = pods(rendered, "worker")
    assert len(workers) == (2 if expected.hosts > 1 else 1)
    for pod in workers:
        resources = pod.main.resources
        assert resources.limits["google.com/tpu"] == expected.chips_per_host
        assert resources.requests.get("google.com/tpu", expected.chips_per_host) == expected.chips_per_host
        assert pod.spec.node_selector["cloud.google.com/gke-tpu-accelerator"] == expected.accelerator
        assert pod.spec.node_selector["cloud.google.com/gke-tpu-topology"] == expected.topology
        assert any(one.get("key") == "google.com/tpu" for one in pod.spec.tolerations)
        assert options(command_of(rendered, pod, pod.main))["tensor_parallel"] == expected.devices
    owner = workers[0].owner
    if expected.hosts == 1:
        assert owner.kind == "StatefulSet"
        return
    assert owner.kind == "LeaderWorkerSet"
    assert owner.spec(LeaderWorkerSetSpec).leader_worker_template.size == expected.hosts
    # One slice is one node pool: a group shares none with another.
    exclusive = owner.metadata.annotations["leaderworkerset.sigs.k8s.io/exclusive-topology"]
    assert exclusive == "cloud.google.com/gke-nodepool"


@pytest.mark.parametrize("expected", SLICES, ids=lambda one: f"{one.machine_type}-{one.topology}")
def test_a_slice_renders_to_its_chips_and_hosts(expected: Slice) -> None:
    assert_runs_on(render(values(expected.generation, expected.machine_type, expected.topology)), expected)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_slice_its_name_says(name: str) -> None:
    machine_type, topology = PRESETS[name]
    (expected,) = [one for one in SLICES if (one.machine_type, one.topology) == (machine_type, topology)]
    rendered = preset(name)
    assert f"{expected.generation}-{expected.chips}" == name.removeprefix("values/")
    assert_runs_on(rendered, expected)


@pytest.mark.parametrize("name", PRESETS)
def test_a_worker_of_a_preset_fits_its_machine(name: str) -> None:
    cpus, memory_gb = MACHINES[PRESETS[name][0]]
    for pod in pods(preset(name), "worker"):
        # What GKE keeps for itself on large machines is below a tenth.
        assert sum(amount(one.resources.requests["cpu"]) for one in pod.spec.containers) <= 0.9 * cpus
        assert sum(amount(one.resources.limits["memory"]) for one in pod.spec.containers) <= 0.9 * memory_gb * 1e9
        for init in pod.spec.init_containers:
            assert amount(init.resources.requests["cpu"]) <= 0.9 * cpus


# Stays free on each device for activations, compiled programs and the runtime: a step of 2048 tokens of the widest of
# these models takes well below 1 GB (2048 x 16384 x 2 bytes = 67 MB a tensor), the runtime about as much.
FREE_GB = 2.0


@pytest.mark.parametrize("name", PRESETS)
def test_weights_and_pages_of_a_preset_fit_into_the_memory_of_its_devices(name: str) -> None:
    """Per device: weights / devices + tokens x 2 (K and V) x layers x KV heads of the device x head dim x bytes.

    Devices share out weights and KV heads; where there are more devices than KV heads, each still holds one.
    """
    rendered = preset(name)
    (leader,) = [pod for pod in pods(rendered, "worker") if pod.leads]
    asked = options(command_of(rendered, leader, leader.main))
    (expected,) = [one for one in SLICES if (one.machine_type, one.topology) == PRESETS[name]]
    model = MODELS[Path(str(asked["model"])).name]
    assert asked["dtype"] == "bfloat16"
    tokens = int(str(asked["num_pages"])) * int(str(asked["page_size"]))
    kv_heads = math.ceil(model.kv_heads / expected.devices)
    pages_gb = tokens * 2 * model.layers * kv_heads * model.head_dim * BFLOAT16_BYTES / 1e9
    weights_gb = model.billions * BFLOAT16_BYTES / expected.devices
    assert weights_gb + pages_gb + FREE_GB <= HBM_GB[expected.generation] / expected.devices_per_chip
    for volume in leader.spec.volumes:
        if volume["name"] == "model" and "emptyDir" in volume:
            assert amount(volume["emptyDir"]["sizeLimit"]) >= model.billions * BFLOAT16_BYTES * 1e9  # type: ignore[index]


@pytest.mark.parametrize("machine_type", sorted({one.machine_type for one in SLICES}))
def test_every_other_topology_is_refused_for_a_machine_type(machine_type: str) -> None:
    generation = next(one.generation for one in SLICES if one.machine_type == machine_type)
    possible = {one.topology for one in SLICES if one.machine_type == machine_type}
    for topology in sorted({one.topology for one in SLICES} - possible):
        with pytest.raises(Refused) as refusal:
            render(values(generation, machine_type, topology))
        said = str(refusal.value)
        assert topology in said
        # What would be right is in the message: a topology of this machine type, or a machine type for this topology.
        assert any(one in said for one in possible), said


def test_the_runtime_of_a_tpu_worker_needs_no_metadata_server() -> None:
    rendered = render(values("v6e", "ct6e-standard-8t", "2x4", backend="xla"))
    (worker,) = pods(rendered, "worker")
    env = dict(command_of(rendered, worker, worker.main).env)
    # Without the second, torch_xla asks the metadata server, which the policies do not let it reach.
    assert (env["PJRT_DEVICE"], env["TPU_SKIP_MDS_QUERY"]) == ("TPU", "true")
    assert env["TPU_ACCELERATOR_TYPE"] == "v6e-8"


@pytest.mark.parametrize("topology", ["2x2", "4x4"])
def test_torchtpu_is_told_how_its_slice_lies_and_where_programs_stay(topology: str) -> None:
    told = []
    for backend, shape in (("xla", "2x2"), ("torchtpu", topology)):
        shown = render(values("v6e", "ct6e-standard-4t", shape, backend=backend))
        told += [options(command_of(shown, pod, pod.main)) for pod in pods(shown, "worker")]
    found = {(one["backend"], one["slice_topology"], one["compile_cache"]) for one in told}
    assert found == {("xla", "", ""), ("torchtpu", topology, "/var/cache/ostrya/torchtpu")}
