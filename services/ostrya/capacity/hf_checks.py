"""Whether the numbers of a config.json agree with each other; hf_kinds.py asks once its spec is made."""

from collections import Counter

from ostrya.capacity.hf_fields import Fields, shown
from ostrya.capacity.layers import Mixer, MoeFfn
from ostrya.capacity.mixers import CompressedAttention, GatedDeltaNet, GroupedAttention, KimiDeltaAttention
from ostrya.capacity.spec import ModelSpec

_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def require_sensible(spec: ModelSpec, fields: Fields) -> None:
    """ConfigError for numbers that contradict each other."""
    for layer in spec.layers:
        if isinstance(layer.ffn, MoeFfn) and layer.ffn.top_k > layer.ffn.num_experts:
            raise fields.refuse(f"{layer.ffn.top_k} experts per token are more than the {layer.ffn.num_experts} it has")
        mixer = layer.mixer
        if isinstance(mixer, GroupedAttention) and mixer.num_heads % mixer.num_kv_heads:
            raise fields.refuse(
                f"num_key_value_heads is {mixer.num_kv_heads}; it must divide the {mixer.num_heads} attention heads"
            )
    if fields.entries("layer_types") is not None:
        _require_layer_types(spec, fields)


def _require_layer_types(spec: ModelSpec, fields: Fields) -> None:
    listed = fields.names("layer_types")
    if len(listed) != spec.num_layers:
        raise fields.refuse(f"layer_types has {len(listed)} entries for {spec.num_layers} layers")
    if any(isinstance(group.mixer, CompressedAttention) for group in spec.layers):
        # These go by compress_ratios.
        return
    built: Counter[str] = Counter()
    for group in spec.layers:
        built[_layer_type(group.mixer)] += group.count
    # A window as long as the context hides nothing.
    whole = built[_WINDOW] == 0 and fields.count("sliding_window") >= spec.max_context_tokens
    found = Counter(_FULL if whole and entry == _WINDOW else entry for entry in listed)
    for kind in (*found, *built):
        if found[kind] != built[kind]:
            raise fields.refuse(
                f"layer_types has {found[kind]} layers of {shown(kind)}; this kind's reader would make {built[kind]}"
            )


def _layer_type(mixer: Mixer) -> str:
    if isinstance(mixer, GatedDeltaNet | KimiDeltaAttention):
        return _LINEAR
    return _WINDOW if isinstance(mixer, GroupedAttention) and mixer.window_tokens is not None else _FULL
