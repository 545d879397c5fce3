"""The noise is the documented function of seed and position, exact in float32, and spread as noise should be."""

import numpy as np
import pytest

from ostrya.engine.noise import uniform

MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_mixing_is_splitmix64() -> None:
    """The first numbers of its published generator started with 1234567."""
    state, drawn = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        drawn.append(mix(state))
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 12), (2**64 - 1, 2**40)])
def test_noise_is_the_top_24_bits_of_the_mixed_pair(seed: int, position: int) -> None:
    expected = (mix((mix(seed) + position * 0x9E3779B97F4A7C15) & MASK) >> 40) / 2**24
    assert float(uniform(seed, position)[0]) == expected


def test_many_at_once_are_each_as_alone() -> None:
    seeds, positions = [3, 3, 2**63, 0], [5, 6, 5, 10**6]
    together = uniform(np.array(seeds, np.uint64), np.array(positions))
    assert together.tolist() == [float(uniform(s, p)[0]) for s, p in zip(seeds, positions, strict=True)]


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_noise_is_spread_evenly_and_neighbours_are_independent(along: str) -> None:
    one_by_one = np.arange(65_536)
    noise = uniform(1, one_by_one) if along == "positions" else uniform(one_by_one, 1)
    assert noise.min() >= 0
    assert noise.max() < 1
    pairs, _, _ = np.histogram2d(noise[:-1], noise[1:], bins=8, range=[(0, 1), (0, 1)])
    expected = (len(noise) - 1) / pairs.size
    chi_square = ((pairs - expected) ** 2 / expected).sum()
    assert chi_square < 110  # 63 degrees of freedom: exceeded once in 4,000
