"""The noise is the documented function of seed and position, exact in float32."""

import hashlib
import struct

import numpy as np
import pytest

from ostrya.engine.noise import uniform


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 12), (2**64 - 1, 2**40)])
def test_noise_is_the_top_24_bits_of_the_digest(seed: int, position: int) -> None:
    digest = hashlib.sha256(struct.pack("<QQ", seed, position)).digest()
    expected = int(digest.hex()[:6], 16) / 2**24
    assert uniform(seed, position) == expected == float(np.float32(expected))


def test_noise_is_spread_over_the_unit_interval() -> None:
    noise = [uniform(1, position) for position in range(4000)]
    assert min(noise) >= 0
    assert max(noise) < 1
    counts, _ = np.histogram(noise, bins=10, range=(0, 1))
    assert counts.min() > 320


def test_noise_of_unknown_seed_and_position_is_fixed() -> None:
    assert uniform(42, 5) == pytest.approx(int(hashlib.sha256(struct.pack("<QQ", 42, 5)).hexdigest()[:6], 16) / 2**24)
