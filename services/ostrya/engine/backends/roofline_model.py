"""What backend roofline pretends to be: a model, the slice it is on, and how many KV pages that has room for.

Called by roofline.py, and by commands that want to refuse before anything is started. No torch.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import floor, prod
from pathlib import Path
from types import MappingProxyType

from ostrya.capacity.chips import Dtype, Slice, find_slice
from ostrya.capacity.hf_config import read_spec
from ostrya.capacity.layers import Part
from ostrya.capacity.memory import Fit, kv_bytes_per_token, require_fit, window_bytes
from ostrya.capacity.models import find_model, models
from ostrya.capacity.spec import ModelSpec, Storage
from ostrya.engine.config import EngineConfig
from ostrya.errors import ModelLoadError

MAX_PAGES = 1 << 22
"""The host keeps some 100 bytes for each page, and nobody fills more in a load test."""
_PARTS = {"token_embd": Part.EMBEDDING, "output": Part.HEAD, "attn": Part.ATTENTION, "ffn": Part.DENSE_FFN}
"""By how a GGUF file's tensor begins, its layer left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A model that fits on a slice."""

    spec: ModelSpec
    where: Slice
    num_pages: int
    """Scratch page included."""
    description: str
    """Where the memory goes, for people."""


def simulated(config: EngineConfig) -> Simulated:
    """What the configuration asks for.

    ConfigError if model or slice are not known; DoesNotFit says by how much it is too large, and what would do.
    """
    spec, where = spec_of(config.model_path), find_slice(config.slice)
    # Room for every request that may run and a page of each: less would be no replica.
    fit = require_fit(
        spec,
        where,
        context_tokens=min(config.page_size, spec.max_context_tokens),
        num_requests=config.max_running,
        chunk_tokens=config.max_step_tokens,
    )
    num_pages = _num_pages(spec, fit, page_size=config.page_size)
    tokens = (num_pages - 1) * config.page_size
    beside_bytes = fit.scratch_bytes + config.max_running * fit.state_bytes_per_request
    more = ", of which no more are simulated" if num_pages == MAX_PAGES else ""
    return Simulated(
        spec=spec,
        where=where,
        num_pages=num_pages,
        description=(
            f"simulated: {spec.name} on {where.name}; {fit.weights_bytes / 1e9:,.1f} GB of weights and "
            f"{beside_bytes / 1e9:,.1f} GB of states and scratch leave room for {tokens:,} KV tokens{more}"
        ),
    )


def spec_of(model: str) -> ModelSpec:
    """By a name that `ostrya capacity --list` shows, or by a config.json, a directory with one or a .gguf file.

    ConfigError or ModelLoadError if it is none of them.
    """
    path = Path(model)
    if model in models() or not path.exists():
        return find_model(model)
    if path.suffix == ".gguf":
        return _of_gguf(path)
    return read_spec(path / "config.json" if path.is_dir() else path)


def _num_pages(spec: ModelSpec, fit: Fit, *, page_size: int) -> int:
    """What the requests leave: states, scratch and full windows are set aside for all that may run."""
    page_bytes = page_size * kv_bytes_per_token(spec)
    used_bytes = fit.num_requests * fit.cache_bytes_per_request
    room = fit.free_bytes + used_bytes - fit.num_requests * window_bytes(spec)
    if not page_bytes:
        return MAX_PAGES
    # At least a page for each request, which was asked for above.
    return min(MAX_PAGES, 1 + max(fit.num_requests, floor(room / page_bytes)))


def _of_gguf(path: Path) -> ModelSpec:
    """With each part's matrices at the bits that they have in the file."""
    # gguf takes a while to import.
    from ostrya.engine.models.families import BY_ARCHITECTURE
    from ostrya.engine.models.gguf_file import GgufFile
    from ostrya.engine.models.gguf_metadata import GgufMetadata

    file = GgufFile(path)
    metadata = GgufMetadata(file)
    family = BY_ARCHITECTURE.get(metadata.architecture) if isinstance(metadata.architecture, str) else None
    if family is None:
        raise ModelLoadError(f"{path}: {metadata.architecture!r} is not known; known: {', '.join(BY_ARCHITECTURE)}")
    num_bytes, num_values = Counter[Part](), Counter[Part]()
    for name, tensor in file.tensors.items():
        kind = name.rpartition(".")[0] if not name.startswith("blk.") else name.split(".")[2]
        part = next((part for begin, part in _PARTS.items() if kind.startswith(begin)), None)
        if part is not None and len(tensor.shape) > 1:
            num_bytes[part] += tensor.num_bytes
            num_values[part] += prod(tensor.shape)
    kept = {part: Storage("gguf", 8 * num_bytes[part] / num_values[part], Dtype.BF16) for part in num_bytes}
    spec = family.from_gguf(metadata).model_spec(path.stem.lower())
    # A tied table is kept once, and read whole by the head.
    kept.setdefault(Part.HEAD, kept[Part.EMBEDDING])
    return replace(spec, storage_by_part=MappingProxyType(kept))
