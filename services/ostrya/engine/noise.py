"""The randomness of sampling, a function of (seed, position) alone.

So a token does not depend on its batch, on a preemption, or on the worker: a stream continued elsewhere from prompt +
generated tokens with the same seed is exact.
"""

import hashlib
import struct


def uniform(seed: int, position: int) -> float:
    """In [0, 1), exact in float32: the top 24 bits of SHA-256(seed u64 | position u64, little-endian) / 2**24.

    `position` is the absolute position of the token being chosen: the number of tokens before it.
    """
    digest = hashlib.sha256(struct.pack("<QQ", seed, position)).digest()
    return int.from_bytes(digest[:3], "big") / 2**24
