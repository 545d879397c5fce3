"""TPU generations and the slices GKE offers of them: memory, bandwidth, peaks, topologies. Each figure has its source.

GB is 1e9 bytes and GiB is 2**30, as each source means it; everything here is in bytes, FLOP/s and bytes/s. Where
sources differ, a limit takes the highest figure that is not another one rounded. "jax" is its file
jax/_src/pallas/mosaic/tpu_info.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType

from ostrya.capacity.values import unknown
from ostrya.errors import ConfigError

GIB = 2**30


class Dtype(StrEnum):
    """What the matrix unit multiplies."""

    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One TPU chip. Source: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}, unless a figure has its own."""

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    peaks: Mapping[Dtype, float]
    """FLOP/s (or integer operations/s) by dtype; a dtype that is missing has no published rate of its own."""
    ici_bytes_per_s: float
    """All links of the chip together, both directions."""
    devices_per_chip: int
    """What the runtime shows as devices; a process drives one."""
    gke_accelerator: str
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""

    def peak_flops_per_s(self, dtype: Dtype) -> float:
        """Of `dtype`, or of bf16 where the chip has no rate for it: values are then widened first."""
        return self.peaks.get(dtype, self.peaks[Dtype.BF16])


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Chips that serve one replica together."""

    name: str
    """Generation and number of chips, such as tpu7x-16. (Cloud TPU's own v5p-8 counts cores; here it has 8 chips.)"""
    chip: Chip
    topology: tuple[int, ...]
    num_hosts: int
    machine_type: str

    @property
    def num_chips(self) -> int:
        return prod(self.topology)

    @property
    def chips_per_host(self) -> int:
        return self.num_chips // self.num_hosts

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices_per_chip

    @property
    def topology_label(self) -> str:
        """Value of the node label cloud.google.com/gke-tpu-topology, such as 2x2x4."""
        return "x".join(map(str, self.topology))

    @property
    def hbm_bytes(self) -> int:
        return self.num_chips * self.chip.hbm_bytes

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.num_chips * self.chip.hbm_bytes_per_s

    def peak_flops_per_s(self, dtype: Dtype) -> float:
        return self.num_chips * self.chip.peak_flops_per_s(dtype)


V5E = Chip(
    name="v5e",
    hbm_bytes=16 * 10**9,
    # jax's 8.20e11 is this one rounded. The 800 "GiB/s" of the newer page are 819.2 GB/s if GiB there means 1.024e9.
    hbm_bytes_per_s=819e9,
    # int8: jax; the documents say 393e12.
    peaks=MappingProxyType({Dtype.BF16: 197e12, Dtype.INT8: 394e12}),
    ici_bytes_per_s=400e9,
    devices_per_chip=1,
    gke_accelerator="tpu-v5-lite-podslice",
)
V5P = Chip(
    name="v5p",
    hbm_bytes=95 * GIB,
    # jax says 2.46e12.
    hbm_bytes_per_s=2765e9,
    # int8: jax; the documents have none. fp8 runs at bf16's.
    peaks=MappingProxyType({Dtype.BF16: 459e12, Dtype.FP8: 459e12, Dtype.INT8: 918e12}),
    ici_bytes_per_s=1200e9,
    # Two TensorCores that the compiler joins ("megacore").
    devices_per_chip=1,
    gke_accelerator="tpu-v5p-slice",
)
V6E = Chip(
    name="v6e",
    hbm_bytes=32 * 10**9,
    # jax's 1.64e12 is this one rounded.
    hbm_bytes_per_s=1638e9,
    peaks=MappingProxyType({Dtype.BF16: 918e12, Dtype.FP8: 918e12, Dtype.INT8: 1836e12}),
    ici_bytes_per_s=800e9,
    devices_per_chip=1,
    gke_accelerator="tpu-v6e-slice",
)
TPU7X = Chip(
    name="tpu7x",
    hbm_bytes=192 * GIB,
    # The documents say 7,380 GB/s; jax 0.10.2 says 7.40e12, which in as many digits is no rounding.
    hbm_bytes_per_s=7.40e12,
    peaks=MappingProxyType({Dtype.BF16: 2307e12, Dtype.FP8: 4614e12}),
    ici_bytes_per_s=1200e9,
    devices_per_chip=2,
    gke_accelerator="tpu7x",
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (V5E, V5P, V6E, TPU7X)})

_CHIPS_PER_VM = 4
"""Of every multi-host slice (xpk: src/xpk/core/system_characteristics.py)."""
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""v5e and v6e: a 2D torus of up to 256 chips. 2x4 also exists as two VMs of 4; here it is the one VM of 8."""
_DEEP = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16))
"""v5p and tpu7x: a 3D torus. Larger ones exist (to 8,960 and 9,216 chips); nobody serves one replica from them."""


def _flat(chip: Chip, family: str) -> tuple[Slice, ...]:
    return tuple(_slice(chip, topology, single_host=8, machine=family) for topology in _FLAT)


def _deep(chip: Chip, family: str, topologies: tuple[tuple[int, ...], ...]) -> tuple[Slice, ...]:
    return tuple(_slice(chip, topology, single_host=4, machine=family) for topology in topologies)


def _slice(chip: Chip, topology: tuple[int, ...], *, single_host: int, machine: str) -> Slice:
    num_chips = prod(topology)
    per_host = num_chips if num_chips <= single_host else _CHIPS_PER_VM
    return Slice(
        name=f"{chip.name}-{num_chips}",
        chip=chip,
        topology=topology,
        num_hosts=num_chips // per_host,
        machine_type=f"{machine}-{per_host}t",
    )


SLICES: tuple[Slice, ...] = (
    *_flat(V5E, "ct5lp-hightpu"),
    *_deep(V5P, "ct5p-hightpu", _DEEP),
    *_flat(V6E, "ct6e-standard"),
    *_deep(TPU7X, "tpu7x-standard", ((1, 1, 1), *_DEEP)),
)
"""Smallest first within a generation. Source of names and topologies: xpk and GKE's compute-class samples."""


def slices_of(generation: str | None = None) -> tuple[Slice, ...]:
    """All slices, or one generation's, smallest first. ConfigError names the generations that exist."""
    if generation is None:
        return SLICES
    if generation not in CHIPS:
        raise ConfigError([f"TPU generation {generation!r} is not known; generations: {', '.join(CHIPS)}"])
    return tuple(found for found in SLICES if found.chip.name == generation)


def find_slice(name: str) -> Slice:
    """By name, such as v6e-8. ConfigError names the slices the generation has."""
    for found in SLICES:
        if found.name == name:
            return found
    generation = name.rpartition("-")[0]
    if generation not in CHIPS:
        form = f"use <generation>-<chips> with a generation of {', '.join(CHIPS)}"
        raise ConfigError([f"{unknown('slice', name, (found.name for found in SLICES))}; {form}"])
    names = ", ".join(found.name for found in slices_of(generation))
    raise ConfigError([f"slice {name[:64]!r} does not exist in generation {generation}; slices: {names}"])
