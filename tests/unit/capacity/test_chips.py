"""Chips and slices are as their documents say, and a wrong name is told what exists."""

from math import prod

import pytest

from ostrya.capacity.chips import CHIPS, SLICES, Dtype, find_slice, slices_of
from ostrya.errors import ConfigError


def test_a_slice_of_ironwood_is_all_its_chips_together() -> None:
    found = find_slice("tpu7x-16")
    assert (found.topology_label, found.num_chips, found.num_devices, found.num_hosts) == ("2x2x4", 16, 32, 4)
    assert found.machine_type == "tpu7x-standard-4t"
    assert found.hbm_bytes == 16 * 192 * 2**30
    assert found.hbm_bytes_per_s == pytest.approx(118.4e12)


@pytest.mark.parametrize(
    ("name", "topology", "hosts", "machine"),
    [
        ("v6e-1", "1x1", 1, "ct6e-standard-1t"),
        ("v6e-8", "2x4", 1, "ct6e-standard-8t"),
        ("v6e-16", "4x4", 4, "ct6e-standard-4t"),
        ("v5e-4", "2x2", 1, "ct5lp-hightpu-4t"),
        ("v5p-8", "2x2x2", 2, "ct5p-hightpu-4t"),
        ("tpu7x-1", "1x1x1", 1, "tpu7x-standard-1t"),
    ],
)
def test_hosts_and_machines_are_those_of_gke(name: str, topology: str, hosts: int, machine: str) -> None:
    found = find_slice(name)
    assert (found.topology_label, found.num_hosts, found.machine_type) == (topology, hosts, machine)


def test_names_are_unique_and_count_the_chips() -> None:
    assert len({found.name for found in SLICES}) == len(SLICES)
    for found in SLICES:
        assert found.name == f"{found.chip.name}-{prod(found.topology)}"
        assert found.num_hosts * found.chips_per_host == found.num_chips


def test_each_generation_has_its_slices_smallest_first() -> None:
    for generation in CHIPS:
        sizes = [found.num_chips for found in slices_of(generation)]
        assert sizes == sorted(sizes)


def test_gb_and_gib_are_kept_apart() -> None:
    assert CHIPS["v6e"].hbm_bytes == 32 * 10**9
    assert CHIPS["v5p"].hbm_bytes == 95 * 2**30


def test_a_dtype_without_a_rate_runs_at_bf16s() -> None:
    v5e = CHIPS["v5e"]
    assert v5e.peak_flops_per_s(Dtype.FP8) == v5e.peak_flops_per_s(Dtype.BF16) == 197e12
    assert CHIPS["tpu7x"].peak_flops_per_s(Dtype.FP8) == 4614e12


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
