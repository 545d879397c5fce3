"""What torch_tpu needs of a machine, and what it is told: found out and decided without loading it or torch.

Loading torch_tpu where libtpu is missing ends the process, and no exception says why; so everything that can be known
is asked here first. Called by torchtpu.py in the engine's own process. Facts of torch-tpu 0.2.0.
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from ostrya.capacity.chips import CHIPS, SLICES, Chip, Slice
from ostrya.engine.world import World

_TORCH_RANGE = (2, 11), (2, 15)
_GOOGLE_VENDOR = "0x1ae0"
_V4: Mapping[int, str] = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
_V5E: Mapping[int, str] = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
# Its two cores are two devices.
_V7: Mapping[int, str] = {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"}
_CHIPS: Mapping[str, tuple[str, Mapping[int, str]]] = {
    "0x005e": ("v4", _V4),
    "0x0062": ("v5p", _V4),
    "0x0063": ("v5e", _V5E),
    "0x006f": ("v6e", _V5E),
    "0x0076": ("tpu7x", _V7),
}
"""By PCI device id: its generation, and how that many devices of one host lie. Other devices of Google's are no TPUs
(its network card)."""
_BASE_PORT = 8070
_TIER_2_NAME = "ostrya"
"""Of the cache in /dev/shm that the processes of one host share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is installed and attached here."""

    torch: str
    """Its version."""
    torch_tpu: str | None
    """Its version; None = not installed."""
    has_libtpu: bool
    generation: str
    """Of its TPUs, as capacity names them; empty without any."""
    topologies: Mapping[int, str]
    """How its devices may be used together: number -> shape."""
    num_devices: int

    @property
    def chip(self) -> Chip | None:
        """None: not known, and so neither is its memory."""
        return CHIPS.get(self.generation)


def this_machine(*, sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> Machine:
    """Looks at metadata and files; loads nothing."""
    ids = [name for name in map(_tpu_id, sorted((sys / "bus/pci/devices").glob("*"))) if name is not None]
    found = [device_id for device_id, group in ids if (dev / "vfio" / group).exists()]
    generation, topologies = _CHIPS[found[0]] if found else ("", {})
    return Machine(
        torch=metadata.version("torch"),
        torch_tpu=_version("torch-tpu"),
        has_libtpu=_has_libtpu(),
        generation=generation,
        topologies=topologies,
        # On the bus are chips (as torch_xla and jax count them too).
        num_devices=len(found) * (CHIPS[generation].devices_per_chip if generation in CHIPS else 1),
    )


def problem(machine: Machine, world: World, *, hosts: Sequence[str], topology: str) -> str | None:
    """The first reason why torch_tpu would not run here, and what to do; None when it should."""
    least, most = (".".join(map(str, version)) for version in _TORCH_RANGE)
    if machine.torch_tpu is None:
        return "torch-tpu is not installed, which backend torchtpu needs; install ostrya[torchtpu]"
    if not _TORCH_RANGE[0] <= _release(machine.torch) <= _TORCH_RANGE[1]:
        return (
            f"torch is {machine.torch}; torch-tpu {machine.torch_tpu} loads with {least} to {most}: install torch 2.13"
        )
    if not machine.has_libtpu:
        return "libtpu is not here, and torch_tpu ends a process without it; install libtpu, or set TPU_LIBRARY_PATH"
    if not machine.num_devices:
        return "this machine shows no TPU (none on the PCI bus that /dev/vfio gives to processes); use backend cpu here"
    num_hosts = world.num_hosts
    if len(hosts) != num_hosts:
        return f"TPU_WORKER_HOSTNAMES names {len(hosts)} hosts; the slice has {num_hosts}: set it to all, in order"
    here = world.size // num_hosts
    if here > machine.num_devices:
        return (
            f"tensor_parallel is {world.size}, which is {here} processes on this host, a TPU device each; "
            f"it has {machine.num_devices}"
        )
    if topology:
        return None
    if num_hosts > 1:
        return f"slice_topology is not set; a slice of {num_hosts} hosts needs it, like 2x2x{num_hosts}"
    if here not in machine.topologies:
        known = ", ".join(map(str, machine.topologies))
        return f"tensor_parallel is {here}; one host of this TPU goes with {known}, or set slice_topology"
    return None


def shape_of(machine: Machine, world: World, topology: str) -> str:
    """How the slice's devices lie, as torch_tpu has it: in three dimensions, and in a fourth where a chip has several.
    `topology` as Kubernetes has it; empty = as many devices of this host as the world needs."""
    if not topology:
        return machine.topologies[world.size // world.num_hosts]
    sides = topology.split("x")
    devices = CHIPS[machine.generation].devices_per_chip if machine.generation in CHIPS else 1
    sides += ["1"] * (3 - len(sides))
    if devices > 1 and len(sides) == 3:
        sides.append(str(devices))
    return ",".join(sides)


def hosts_of(world: World, environ: Mapping[str, str]) -> list[str]:
    """The slice's hosts in order, as GKE and LeaderWorkerSet name them."""
    if world.num_hosts == 1:
        return ["localhost"]
    return [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]


def environment(
    world: World,
    *,
    hosts: Sequence[str],
    shape: str,
    compile_cache: str = "",
    given: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What a process has to set before it loads torch_tpu. What is `given` already for the slice stays, as torch_tpu's
    own set_tpu_launch_env leaves it."""
    here = world.size // world.num_hosts
    host, _, port = world.rendezvous.rpartition(":")
    first_port = int((given or {}).get("TORCH_TPU_BASE_PORT", _BASE_PORT))
    slice_wide = {
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"{name}:{first_port + i}" for name in hosts for i in range(here)),
        "TORCH_TPU_TOPOLOGY": shape,
    }
    ranks = {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(here),
    }
    rendezvous = {"MASTER_ADDR": host, "MASTER_PORT": port} if world.rendezvous else {}
    caches = {"TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": compile_cache} if compile_cache else {}
    return {
        # It is loaded when everything is set, not by the first `import torch`.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # Otherwise Dynamo ends a graph at each collective.
        "TORCH_TPU_INTERNAL_MATERIALIZE_COLLECTIVE_TENSORS": "false",
        "TORCH_TPU_TIER2_COMPILATION_CACHE": _TIER_2_NAME,
        **caches,
        **ranks,
        **rendezvous,
        **{name: (given or {}).get(name, value) for name, value in slice_wide.items()},
    }


def slice_of(machine: Machine, num_devices: int) -> Slice | None:
    """What those devices are to capacity; None where it knows no such slice."""
    return next(
        (one for one in SLICES if one.chip.name == machine.generation and one.num_devices == num_devices),
        None,
    )


def cache_problem(directory: str) -> str | None:
    """Why compiled programs cannot stay there; None when they can. Makes the directory."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return f"compile_cache {directory} cannot be written ({error.strerror}); programs are compiled at every start"
    return None


def _tpu_id(device: Path) -> tuple[str, str] | None:
    """PCI id and IOMMU group of a TPU; None for anything else."""
    try:
        vendor, device_id = ((device / name).read_text().strip() for name in ("vendor", "device"))
        if vendor != _GOOGLE_VENDOR or device_id not in _CHIPS:
            return None
        return device_id, (device / "iommu_group").readlink().name
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _has_libtpu() -> bool:
    named = os.environ.get("TPU_LIBRARY_PATH")
    return Path(named).is_file() if named else util.find_spec("libtpu") is not None


def _release(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
