"""What somebody might have written into Redis instead of a row: seeded damage, from a flipped bit to another type."""

import math
import os
import random
import struct

import msgspec

NUMBERS: tuple[object, ...] = (
    *(0, -1, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0, 0.5),
)
WORDS: tuple[object, ...] = (
    *(
        "",
        "\x00",
        "w0\n",
        "w0\r\nlevel=error",
        "\x1b[2J",
        "\u202e0w",
        "w" * 300,
        "0",
        "a:1",
        "127.0.0.1:0",
        "[::1]:65536",
    ),
    *(b"", b"\xff", None, True, [], {}, {"e": 1}, [[[[]]]]),
)
NOT_NUMBERS = (
    b"",
    b"x",
    b"-",
    b"+1",
    b" 1",
    b"1_0",
    b"1e3",
    b"0x10",
    b"nan",
    b"inf",
    b"\xff",
    b"9" * 5_000,
    b"-1",
    b"1.5",
)


def num_mutations(usual: int) -> int:
    """OSTRYA_FUZZ of them if it is set: `OSTRYA_FUZZ=100000 pytest -k mutation`."""
    return int(os.environ.get("OSTRYA_FUZZ", usual))


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """The bytes, damaged in one of many ways."""
    damage = rng.randrange(8)
    position = rng.randrange(len(raw) + 1)
    if damage == 0 and raw:
        changed = bytearray(raw)
        changed[position % len(raw)] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if damage == 1:
        return raw[:position]
    if damage == 2:
        return raw[:position] + rng.randbytes(rng.randrange(1, 9)) + raw[position:]
    if damage == 3 and raw:
        changed = bytearray(raw)
        for at in range(position, min(len(raw), position + rng.randrange(1, 9))):
            changed[at] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        return bytes(changed)
    if damage == 4:
        return rng.randbytes(rng.randrange(64))
    if damage == 5:
        return raw + raw[position:]
    if damage == 6:
        return rng.choice(NOT_NUMBERS)
    return with_field(rng, raw)


def with_field(rng: random.Random, raw: bytes) -> bytes:
    """A packed row with one of its values replaced by a wild one; rows of other shapes become one value."""
    value = rng.choice(NUMBERS + WORDS)
    try:
        row = msgspec.msgpack.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        row = None
    if isinstance(row, list) and row:
        row[rng.randrange(len(row))] = value
        return msgspec.msgpack.encode(row)
    return msgspec.msgpack.encode(value)


def integer(rng: random.Random) -> bytes:
    """What a hash field may hold instead of a number of ours; often one, and too large."""
    return rng.choice((*NOT_NUMBERS, str(rng.choice((2**53 - 2, 2**53, 2**63, 2**64, 10**40, 7))).encode()))


def batch(rng: random.Random) -> bytes:
    """Packed events that may be anything, and often are well formed."""
    parts = []
    for _ in range(rng.randrange(5)):
        count = rng.choice((0, 1, 2, 50, 2**32 - 1))
        parts.append(struct.pack(">BI", rng.choice((0, 1, 1, 1, 2, 3, 4, 255)), count))
        parts.append(rng.randbytes(8 * min(count, 50)))
    return b"".join(parts)
