"""Chips and slices are as their documents say, and a wrong name is told what exists."""

import pytest

from ostrya.capacity.chips import CHIPS, SLICES, Dtype, find_slice, slices_of
from ostrya.errors import ConfigError

_GIB = 2**30


# docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; tpu7x's bandwidth and the int8 rates of v5e and v5p: jax 0.10.2,
# _src/pallas/mosaic/tpu_info.py; accelerators: xpk, system_characteristics.py. A chip without a rate of its own for a
# dtype (v5e fp8, tpu7x int8) runs at bf16's.
@pytest.mark.parametrize(
    ("name", "hbm", "bandwidth", "bf16", "fp8", "int8", "ici", "devices", "accelerator"),
    [
        ("v5e", 16 * 10**9, 819e9, 197e12, 197e12, 394e12, 400e9, 1, "tpu-v5-lite-podslice"),
        ("v5p", 95 * _GIB, 2765e9, 459e12, 459e12, 918e12, 1200e9, 1, "tpu-v5p-slice"),
        ("v6e", 32 * 10**9, 1638e9, 918e12, 918e12, 1836e12, 800e9, 1, "tpu-v6e-slice"),
        ("tpu7x", 192 * _GIB, 7.40e12, 2307e12, 4614e12, 2307e12, 1200e9, 2, "tpu7x"),
    ],
)
def test_a_chip_has_the_figures_of_its_documents(
    name: str,
    hbm: int,
    bandwidth: float,
    bf16: float,
    fp8: float,
    int8: float,
    ici: float,
    devices: int,
    accelerator: str,
) -> None:
    chip = CHIPS[name]
    assert (chip.name, chip.hbm_bytes, chip.hbm_bytes_per_s, chip.ici_bytes_per_s) == (name, hbm, bandwidth, ici)
    assert {dtype: chip.peak_flops_per_s(dtype) for dtype in Dtype} == {
        Dtype.BF16: bf16,
        Dtype.FP8: fp8,
        Dtype.INT8: int8,
    }
    assert (chip.devices_per_chip, chip.gke_accelerator) == (devices, accelerator)


# Name, topology, hosts, machine type; xpk's system_characteristics.py, GKE's compute-class samples.
_SLICES = """
v5e-1 1x1 1 ct5lp-hightpu-1t
v5e-4 2x2 1 ct5lp-hightpu-4t
v5e-8 2x4 1 ct5lp-hightpu-8t
v5e-16 4x4 4 ct5lp-hightpu-4t
v5e-32 4x8 8 ct5lp-hightpu-4t
v5e-64 8x8 16 ct5lp-hightpu-4t
v5e-128 8x16 32 ct5lp-hightpu-4t
v5e-256 16x16 64 ct5lp-hightpu-4t
v5p-4 2x2x1 1 ct5p-hightpu-4t
v5p-8 2x2x2 2 ct5p-hightpu-4t
v5p-16 2x2x4 4 ct5p-hightpu-4t
v5p-32 2x4x4 8 ct5p-hightpu-4t
v5p-64 4x4x4 16 ct5p-hightpu-4t
v5p-128 4x4x8 32 ct5p-hightpu-4t
v5p-256 4x8x8 64 ct5p-hightpu-4t
v5p-512 8x8x8 128 ct5p-hightpu-4t
v5p-1024 8x8x16 256 ct5p-hightpu-4t
v6e-1 1x1 1 ct6e-standard-1t
v6e-4 2x2 1 ct6e-standard-4t
v6e-8 2x4 1 ct6e-standard-8t
v6e-16 4x4 4 ct6e-standard-4t
v6e-32 4x8 8 ct6e-standard-4t
v6e-64 8x8 16 ct6e-standard-4t
v6e-128 8x16 32 ct6e-standard-4t
v6e-256 16x16 64 ct6e-standard-4t
tpu7x-1 1x1x1 1 tpu7x-standard-1t
tpu7x-4 2x2x1 1 tpu7x-standard-4t
tpu7x-8 2x2x2 2 tpu7x-standard-4t
tpu7x-16 2x2x4 4 tpu7x-standard-4t
tpu7x-32 2x4x4 8 tpu7x-standard-4t
tpu7x-64 4x4x4 16 tpu7x-standard-4t
tpu7x-128 4x4x8 32 tpu7x-standard-4t
tpu7x-256 4x8x8 64 tpu7x-standard-4t
tpu7x-512 8x8x8 128 tpu7x-standard-4t
tpu7x-1024 8x8x16 256 tpu7x-standard-4t
"""


def test_slices_are_those_of_gke_smallest_first_in_each_generation() -> None:
    listed = [f"{one.name} {one.topology_label} {one.num_hosts} {one.machine_type}" for one in SLICES]
    assert listed == _SLICES.split("\n")[1:-1]
    for one in SLICES:
        assert find_slice(one.name) is one
        assert one.name == f"{one.chip.name}-{one.num_chips}"
        assert one.machine_type.endswith(f"-{one.chips_per_host}t")
    for generation in CHIPS:
        assert slices_of(generation) == tuple(one for one in SLICES if one.name.startswith(f"{generation}-"))
    assert slices_of() == SLICES


def test_a_slice_is_all_its_chips_together() -> None:
    found = find_slice("tpu7x-16")
    assert (found.num_chips, found.chips_per_host, found.num_devices) == (16, 4, 32)
    assert found.hbm_bytes == 16 * 192 * _GIB
    assert found.hbm_bytes_per_s == pytest.approx(118.4e12)
    assert found.peak_flops_per_s(Dtype.FP8) == pytest.approx(73.824e15)
    # v5p has two cores in a chip, and the runtime shows one device.
    assert find_slice("v5p-8").num_devices == 8


def test_a_slice_that_is_not_in_its_generation_lists_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'v6e-24' does not exist in generation v6e; slices: v6e-1, .*, v6e-256"):
        find_slice("v6e-24")


def test_an_unknown_generation_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"'h100-8' is not known.*v5e, v5p, v6e, tpu7x"):
        find_slice("h100-8")
    with pytest.raises(ConfigError, match=r"'v7x-4' is not known \(nearest: tpu7x-4\); use "):
        find_slice("v7x-4")
    with pytest.raises(ConfigError, match="'v9' is not known"):
        slices_of("v9")
