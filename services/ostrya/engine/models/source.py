"""Where weights come from: one protocol over a GGUF file and a Hugging Face directory.

Tensor names are GGUF's ("blk.0.attn_q.weight"). The two halves of a rotary pair are neighbours, in the rows of q and k
and in their biases and norms. A norm's weight is what it multiplies with.
Every failure is a ModelLoadError of one line.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ostrya.engine.models.quantized import Quantized
from ostrya.engine.models.reading import is_covered
from ostrya.engine.models.sharding import Part, Region
from ostrya.engine.models.spec import DecoderSpec
from ostrya.errors import ModelLoadError


class Wanted(NamedTuple):
    """A tensor and what of it, as read_into is asked for it."""

    name: str
    region: Region


class WeightSource(Protocol):
    """An open checkpoint."""

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def num_bytes_read(self) -> int:
        """Of tensors, so far, from files."""

    def ahead(self, expected: Sequence[Wanted]) -> AbstractContextManager[None]:
        """Inside, what is expected next is read while the last is converted. Anything else can be asked for, too."""

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """ModelLoadError when the tensor is missing or has another shape. Ask before setting memory aside for it."""

    def read_into(self, name: str, out: torch.Tensor, region: Region) -> None:
        """Requires the tensor, then fills `out`, of the region's local shape, converting to its dtype."""

    def quantized(self, name: str, region: Region) -> Quantized | None:
        """Requires the matrix; then the region as the checkpoint holds it, None where that is not at 4 or 8 bits in
        groups, or where the region cuts a group."""

    def unread(self) -> list[str]:
        """Tensors of the checkpoint that nobody required: parts of a model that we would compute wrongly."""


def open_source(path: Path) -> WeightSource:
    """Opens a .gguf file or a directory with config.json and *.safetensors; reads no weights yet."""
    from ostrya.engine.models.gguf import GgufSource
    from ostrya.engine.models.huggingface import HuggingFaceSource

    if path.is_dir():
        return HuggingFaceSource(path)
    if path.is_file():
        return GgufSource(path)
    raise ModelLoadError(f"{path}: no such file or directory")


_ROTATED = re.compile(r"blk\.(\d+)\.attn_[qk](_norm)?\.(weight|bias)")


def rotated_rows(name: str, spec: DecoderSpec) -> int:
    """How many rows of a tensor pairs_side_by_side takes together: a head of q and k, else 1."""
    found = _ROTATED.fullmatch(name)
    return spec.layers[int(found[1])].mixer.sizes.head_dim if found else 1


def pairs_side_by_side(name: str, values: torch.Tensor, spec: DecoderSpec) -> torch.Tensor:
    """The values of a checkpoint that pairs rotary element i of a head with i + H/2, in WeightSource's order: pairs
    (2i, 2i + 1)."""
    found = _ROTATED.fullmatch(name)
    if found is None:
        return values
    head_dim = spec.layers[int(found[1])].mixer.sizes.head_dim
    return values.view(-1, 2, head_dim // 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def cut(values: torch.Tensor, parts: tuple[Part, ...]) -> torch.Tensor:
    """The parts of a tensor's dimensions; a view where one range is all of a part."""
    for dim, part in enumerate(parts):
        if len(part.ranges) == 1 and is_covered(part):
            values = values.narrow(dim, part.ranges[0].start, part.size)
            continue
        shape = list(values.shape)
        shape[dim] = part.size
        whole, values = values, values.new_zeros(shape)
        for at, start, stop in part.ranges:
            values.narrow(dim, at, stop - start).copy_(whole.narrow(dim, start, stop - start))
    return values


def checked(spec: DecoderSpec, path: Path) -> DecoderSpec:
    """The spec that was read from `path`, if its numbers agree with each other."""
    if problem := spec.problem():
        raise ModelLoadError(f"{path}: {problem}")
    return spec
