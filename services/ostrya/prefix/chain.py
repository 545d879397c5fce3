"""Token ids to digests: the only definition of prefix identity.

The engine keys pages by the full digest, the router and the journal use its first 8 bytes at every `routing_stride`-th
page.
    d0   = SHA-256(frame(scheme) | frame(model) | frame(tokenizer) | frame(adapter) | frame(namespace))
    d(i) = SHA-256(d(i-1) | tokens of page i as u32 little-endian)
where frame(x) is x's UTF-8 length as u32 little-endian, then x: no two different keys have the same bytes.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType, cast

SCHEME = "ostrya-chain-1"

_FIRST_8_OF_32 = struct.Struct(">Q24x")

Digest = NewType("Digest", bytes)
"""32 bytes: the identity of a page together with everything before it."""

RoutingDigest = NewType("RoutingDigest", int)
"""The first 8 bytes of a Digest, big-endian, as an int below 2**64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainKey:
    """What, besides the tokens, two requests must share to share KV pages."""

    model: str
    tokenizer_fingerprint: str
    adapter: str = ""
    namespace: str = ""


def root(key: ChainKey) -> Digest:
    """d0 of the chain."""
    fields = (SCHEME, key.model, key.tokenizer_fingerprint, key.adapter, key.namespace)
    framed = b"".join(struct.pack("<I", len(raw)) + raw for raw in (field.encode() for field in fields))
    return Digest(hashlib.sha256(framed).digest())


def pack_tokens(token_ids: Iterable[int]) -> "array[int]":
    """Token ids as u32, which is what the digests cover."""
    return array("I", token_ids)


def page_digests(start: Digest, token_ids: Sequence[int], *, page_size: int) -> list[Digest]:
    """Digests of the full pages of `token_ids`, continuing from `start` (the root, or the digest of the page before).

    A trailing part of a page has no digest. Pass an `array("I")` to skip the packing.
    """
    packed = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else pack_tokens(token_ids)
    if sys.byteorder == "big":
        packed = array("I", packed)
        packed.byteswap()
    raw = packed.tobytes()
    page_bytes = page_size * packed.itemsize
    whole = raw[: len(raw) // page_bytes * page_bytes]
    digest: bytes = start
    sha256 = hashlib.sha256
    pages = struct.iter_unpack(f"{page_bytes}s", whole)
    # Cast as a whole: this is most of a routing decision, and a NewType call a page costs a tenth of it.
    return cast("list[Digest]", [digest := sha256(digest + page).digest() for (page,) in pages])


def routing_digest(digest: Digest) -> RoutingDigest:
    """What the router and the journal use of a digest."""
    return RoutingDigest(int.from_bytes(digest[:8], "big"))


def routing_digests(digests: Sequence[Digest], *, stride: int) -> list[RoutingDigest]:
    """Of every `stride`-th page: element i covers (i + 1) * stride pages."""
    covering = _FIRST_8_OF_32.iter_unpack(b"".join(digests[stride - 1 :: stride]))
    return cast("list[RoutingDigest]", [first for (first,) in covering])


def self_test(key: ChainKey, *, page_size: int, stride: int) -> bytes:
    """What two processes with the same chain compute alike: routing digests of tokens 0, 1, 2, ..., 4 blocks long."""
    digests = page_digests(root(key), range(4 * stride * page_size), page_size=page_size)
    return struct.pack(">4Q", *routing_digests(digests, stride=stride))
