"""What torch_tpu needs is asked of the machine before it is loaded; what it is told depends on the slice alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ostrya.capacity.chips import CHIPS
from ostrya.engine.backends.torchtpu_machine import (
    Machine,
    cache_problem,
    environment,
    hosts_of,
    problem,
    shape_of,
    slice_of,
    this_machine,
)
from ostrya.engine.world import World

HOST = ["localhost"]
V6E = Machine(
    torch="2.13.0+cpu",
    torch_tpu="0.2.0",
    has_libtpu=True,
    generation="v6e",
    topologies={1: "1,1,1", 4: "2,2,1", 8: "2,4,1"},
    num_devices=4,
)


def test_a_machine_with_all_it_takes_has_no_problem() -> None:
    for torch in ("2.11.0", "2.13.0+cpu", "2.15.1"):
        assert problem(replace(V6E, torch=torch), World(size=4), hosts=HOST, topology="") is None
    assert problem(V6E, World(size=8, num_hosts=2), hosts=["a", "b"], topology="2x4") is None
    assert problem(V6E, World(size=3), hosts=HOST, topology="1x3") is None


@pytest.mark.parametrize(
    ("machine", "size", "words"),
    [
        (replace(V6E, torch_tpu=None), 1, "torch-tpu is not installed, which backend torchtpu needs; install"),
        (replace(V6E, torch="2.9.1"), 1, "torch is 2.9.1; torch-tpu 0.2.0 loads with 2.11 to 2.15: install"),
        (replace(V6E, torch="2.16.0"), 1, "torch is 2.16.0; torch-tpu 0.2.0 loads with 2.11 to 2.15: install"),
        (
            replace(V6E, has_libtpu=False),
            1,
            "libtpu is not here, and torch_tpu ends a process without it; install",
        ),
        (replace(V6E, num_devices=0), 1, "this machine shows no TPU"),
        (V6E, 8, "tensor_parallel is 8, which is 8 processes on this host, a TPU device each; it has 4"),
        (V6E, 3, "tensor_parallel is 3; one host of this TPU goes with 1, 4, 8, or set slice_topology"),
    ],
)
def test_what_is_missing_is_one_line(machine: Machine, size: int, words: str) -> None:
    found = problem(machine, World(size=size), hosts=HOST, topology="")
    assert found is not None
    assert re.match(re.escape(words), found)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["a", "b"], "slice_topology is not set; a slice of 2 hosts needs it"),
        (["a"], "TPU_WORKER_HOSTNAMES names 1 hosts; the slice has 2: set it to all, in order"),
    ],
)
def test_a_slice_of_several_hosts_says_what_it_is(hosts: list[str], words: str) -> None:
    found = problem(V6E, World(size=8, num_hosts=2), hosts=hosts, topology="")
    assert found is not None
    assert found.startswith(words)


def pci_device(root: Path, name: str, *, vendor: str, device: str, group: str | None) -> None:
    path = root / "sys/bus/pci/devices" / name
    path.mkdir(parents=True)
    (path / "vendor").write_text(f"{vendor}\n")
    (path / "device").write_text(f"{device}\n")
    if group is not None:
        (path / "iommu_group").symlink_to(f"/sys/kernel/iommu_groups/{group}")


def test_devices_are_tpus_that_vfio_gives_away(tmp_path: Path) -> None:
    for number, group in enumerate(["0", "1", "2", None]):
        pci_device(tmp_path, f"0000:00:0{number}.0", vendor="0x1ae0", device="0x006f", group=group)
    # Google's network card, and another maker's device.
    pci_device(tmp_path, "0000:00:08.0", vendor="0x1ae0", device="0x0042", group="0")
    pci_device(tmp_path, "0000:00:09.0", vendor="0x10de", device="0x006f", group="0")
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for group in ("0", "1"):
        (tmp_path / "dev/vfio" / group).touch()
    found = this_machine(sys=tmp_path / "sys", dev=tmp_path / "dev")
    assert (found.num_devices, found.generation, found.topologies[4]) == (2, "v6e", "2,2,1")
    nothing = this_machine(sys=tmp_path, dev=tmp_path)
    assert (nothing.num_devices, nothing.chip) == (0, None)
    assert found.chip is CHIPS["v6e"]
    assert found.torch_tpu is None


def test_devices_are_a_slice_whose_limits_are_published() -> None:
    found = [slice_of(V6E, 4), slice_of(replace(V6E, generation="tpu7x"), 8), slice_of(V6E, 3), slice_of(V6E, 0)]
    assert [one and one.name for one in found] == ["v6e-4", "tpu7x-4", None, None]


def test_libtpu_may_be_named_by_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    assert not this_machine(sys=tmp_path, dev=tmp_path).has_libtpu
    (tmp_path / "libtpu.so").touch()
    assert this_machine(sys=tmp_path, dev=tmp_path).has_libtpu


@pytest.mark.parametrize(
    ("generation", "topology", "shape"),
    [
        ("v6e", "2x4", "2,4,1"),
        ("v5p", "2x2x4", "2,2,4"),
        ("tpu7x", "2x2x1", "2,2,1,2"),
        ("tpu7x", "2x2x1x1", "2,2,1,1"),
        ("v4", "2x2x2", "2,2,2"),
        ("v6e", "", "2,2,1"),
    ],
)
def test_a_slice_has_the_shape_that_torch_tpu_reads(generation: str, topology: str, shape: str) -> None:
    assert shape_of(replace(V6E, generation=generation), World(size=4), topology) == shape


def test_each_rank_of_one_host_is_told_the_same_slice() -> None:
    found = [
        environment(World(rank=rank, size=4, rendezvous="127.0.0.1:555"), hosts=HOST, shape="2,2,1")
        for rank in range(4)
    ]
    assert {one["TORCH_TPU_SLICEBUILDER_ADDRESSES"] for one in found} == {
        "localhost:8070,localhost:8071,localhost:8072,localhost:8073"
    }
    assert {one["TORCH_TPU_TOPOLOGY"] for one in found} == {"2,2,1"}
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in found] == [
        (str(rank), str(rank), "4") for rank in range(4)
    ]
    assert (found[3]["MASTER_ADDR"], found[3]["MASTER_PORT"]) == ("127.0.0.1", "555")


def test_ranks_of_several_hosts_count_through() -> None:
    world = World(rank=5, size=8, rendezvous="a:9", num_hosts=2)
    hosts = hosts_of(world, {"TPU_WORKER_HOSTNAMES": "a,b,"})
    assert hosts == ["a", "b"]
    found = environment(
        world,
        hosts=hosts,
        shape="2,2,2",
        given={"TORCH_TPU_BASE_PORT": "700"},
    )
    assert found["TORCH_TPU_SLICEBUILDER_ADDRESSES"] == "a:700,a:701,a:702,a:703,b:700,b:701,b:702,b:703"
    assert (found["RANK"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("5", "1", "4")
    assert found["TORCH_TPU_TOPOLOGY"] == "2,2,2"
    # A virtual machine with one host names it too, and what is alone there needs no other's name.
    assert hosts_of(World(), {"TPU_WORKER_HOSTNAMES": "t1v-n-0"}) == HOST


def test_what_is_set_for_the_slice_stays_and_the_caches_follow_the_settings() -> None:
    given = {"TORCH_TPU_TOPOLOGY": "1,1,1,2", "TORCH_TPU_SLICEBUILDER_ADDRESSES": "h:1", "RANK": "7"}
    found = environment(World(), hosts=HOST, shape="1,1,1", compile_cache="/cache", given=given)
    assert (found["TORCH_TPU_TOPOLOGY"], found["TORCH_TPU_SLICEBUILDER_ADDRESSES"]) == ("1,1,1,2", "h:1")
    # Whose rank this is, we know ourselves.
    assert found["RANK"] == "0"
    assert found["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] == "/cache"
    assert found["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert found["TORCH_TPU_INTERNAL_MATERIALIZE_COLLECTIVE_TENSORS"] == "false"
    plain = environment(World(), hosts=HOST, shape="1,1,1")
    assert "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT" not in plain
    assert "MASTER_ADDR" not in plain


def test_a_cache_that_cannot_be_written_is_said_and_is_no_reason_to_stop(tmp_path: Path) -> None:
    assert cache_problem(str(tmp_path / "new" / "cache")) is None
    (tmp_path / "file").touch()
    found = cache_problem(str(tmp_path / "file"))
    assert (
        found == f"compile_cache {tmp_path}/file cannot be written (File exists); programs are compiled at every start"
    )


def test_a_chip_of_tpu7x_is_two_devices(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:00:00.0", vendor="0x1ae0", device="0x0076", group="0")
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/0").touch()
    assert this_machine(sys=tmp_path / "sys", dev=tmp_path / "dev").num_devices == 2
