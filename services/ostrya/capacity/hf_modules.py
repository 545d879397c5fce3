"""What the module names and patterns of a quantization_config mean, read by the words in them.

Whole names (model.layers.0.mlp.up_proj), pieces (mlp.gate), wildcards (model.layers.*.self_attn*) and the simple
regular expressions of compressed-tensors (re:.*mlp\\.(gate|up)_proj.*) all come out as the same words. Patterns are
never run: a file is not to be trusted with a regular expression.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from math import prod


class Pool(StrEnum):
    """Weights that a name can mean."""

    SELF_ATTENTION = "self attention"
    LINEAR_ATTENTION = "gated delta nets"
    """Apart from the others since their modules have a name of their own; those of KDA have not."""
    DENSE_FFN = "dense ffn"
    ROUTED_EXPERTS = "routed experts"
    SHARED_EXPERTS = "shared experts"


_ATTENTION = frozenset({Pool.SELF_ATTENTION, Pool.LINEAR_ATTENTION})
_FFN = frozenset({Pool.DENSE_FFN, Pool.ROUTED_EXPERTS, Pool.SHARED_EXPERTS})
_PROJECTION = re.compile(r"(gate|up|down|gate_up)_proj|w[123]")
_WORDS = tuple(
    (re.compile(pattern), frozenset(pools))
    for pattern, pools in (
        # Outside the layers or not the model's, and what is never quantized or too small to count.
        (r"lm_head|.*embed.*|.*vision.*|.*visual.*|.*projector.*|.*image.*|.*audio.*", ()),
        (r"mtp.*|.*eagle.*|.*draft.*|.*flash.*|nextn.*|eh_proj|shared_head", ()),
        (r".*norm.*|.*res_proj|.*bias|a_log|conv1d|in_proj_(a|b|ba)|shared_expert_gate|routed_expert(_.*)?", ()),
        (r"shared_(experts?|mlp)", {Pool.SHARED_EXPERTS}),
        (r"(routed_)?experts", {Pool.ROUTED_EXPERTS}),
        (r"linear_attn|in_proj_.*|out_proj", {Pool.LINEAR_ATTENTION}),
        (r"self_attn|self_attention|(q|k|v|o|g|kv|qkv)(_[ab])?_proj(_with_mqa)?", {Pool.SELF_ATTENTION}),
        (r"attn|attention", _ATTENTION),
        (r"gate|router", ()),
        (r"block_sparse_moe|moe", {Pool.ROUTED_EXPERTS, Pool.SHARED_EXPERTS}),
        (rf"mlp|ffn|feed_forward|{_PROJECTION.pattern}", _FFN),
    )
)
"""The first row that fits any word of a name counts."""
_WITHOUT_MEANING = frozenset({"re", "model", "language_model", "layers"})
_MAX_PATTERN = 512
_MAX_ALTERNATIVES = 128
"""More than the layers of a model; those of several groups multiply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a name means: pools, in all layers or in one, and of routed experts all or one."""

    pools: frozenset[Pool]
    layer: int | None = None
    """From 0."""
    expert: int | None = None


def named(name: str) -> tuple[Named, ...] | None:
    """One for each alternative of the pattern; None if it is not understood."""
    pattern = re.sub(r"(\[0-9\]|\\d)[+*]", "*", name).replace("[.]", ".").replace(r"\.", ".").replace("(?:", "(")
    num_alternatives = prod(part.count("|") + 1 for part in pattern.split("("))
    if len(pattern) > _MAX_PATTERN or num_alternatives > _MAX_ALTERNATIVES or re.search(r"\(\?|[\[\\{]", pattern):
        return None
    found = [_named(text) for text in _alternatives(pattern)]
    return None if None in found else tuple(one for one in found if one is not None)


def _alternatives(pattern: str) -> list[str]:
    group = re.search(r"\(([^()]*)\)", pattern)
    if group is None:
        return pattern.split("|")
    before, after = pattern[: group.start()], pattern[group.end() :]
    return [text for choice in group[1].split("|") for text in _alternatives(before + choice + after)]


def _named(text: str) -> Named | None:
    words = re.findall(r"[a-z]\w*", text.lower())
    layer, expert = re.search(r"layers\.(\d+)", text), re.search(r"experts\.(\d+)", text)
    pools = next((pools for pattern, pools in _WORDS if any(map(pattern.fullmatch, words))), None)
    if pools is None and layer is not None and _WITHOUT_MEANING.issuperset(words):
        pools = _ATTENTION | _FFN
    if pools is None or (expert is not None and layer is None):
        return None
    if pools == _FFN and layer is None and "mlp" in words and any(map(_PROJECTION.fullmatch, words)):
        # Experts have their own word between these two.
        pools = frozenset({Pool.DENSE_FFN})
    return Named(
        pools=pools,
        layer=None if layer is None else int(layer[1]),
        expert=int(expert[1]) if expert is not None and Pool.ROUTED_EXPERTS in pools else None,
    )
