"""The randomness of sampling, a function of (seed, position) alone.

So a token does not depend on its batch, on a preemption, or on the worker: a stream continued elsewhere from prompt +
generated tokens with the same seed is exact.
"""

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

# SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """In [0, 1), exact in float32: the top 24 bits of mix(mix(seed) + position * gamma) / 2**24, of each pair.

    Both are u64, [R]. A position is the absolute one of the token being chosen: the number of tokens before it. mix and
    gamma are SplitMix64's: each seed starts its stream at an unrelated place, and a whole step costs a few array
    operations (hashing row by row cost 0.2 ms at 256 rows).
    """
    streams = _mix(np.atleast_1d(np.asarray(seeds, np.uint64)))
    bits = _mix(streams + np.asarray(positions, np.uint64) * _GAMMA) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2**-24)


def _mix(z: U64) -> U64:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
