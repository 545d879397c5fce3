"""Kinds of config.json whose attention keeps a latent or compressed entries: DeepSeek's and Moonshot's."""

from ostrya.capacity.hf_fields import Fields
from ostrya.capacity.hf_quantization import read_quantization
from ostrya.capacity.layers import DenseFfn, MoeFfn
from ostrya.capacity.mixers import CompressedAttention, Indexer, KimiDeltaAttention, LatentAttention
from ostrya.capacity.models.deepseek import deepseek_v4
from ostrya.capacity.models.families import stacked
from ostrya.capacity.models.kimi import deepseek_v3_like
from ostrya.capacity.spec import FP8, ModelSpec


def _latent(fields: Fields) -> LatentAttention:
    return LatentAttention(
        num_heads=fields.size("num_attention_heads"),
        q_rank=fields.size("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        output_gate=fields.flag("mla_use_output_gate"),
    )


def _require_layer_each(fields: Fields) -> None:
    if fields.size("moe_layer_freq", default=1) != 1:
        raise fields.refuse("moe_layer_freq is not 1, which this kind's reader cannot express")


def deepseek_v3(fields: Fields, name: str) -> ModelSpec:
    _require_layer_each(fields)
    num_layers = fields.num_layers()
    return deepseek_v3_like(
        name=name,
        num_layers=num_layers,
        num_dense_layers=fields.count("first_k_dense_replace", highest=num_layers),
        hidden=fields.size("hidden_size"),
        dense_inner=fields.size("intermediate_size"),
        attention=_latent(fields),
        experts=MoeFfn(
            num_experts=fields.size("n_routed_experts"),
            top_k=fields.size("num_experts_per_tok"),
            inner=fields.size("moe_intermediate_size"),
            num_shared=fields.count("n_shared_experts"),
        ),
        vocab_size=fields.size("vocab_size"),
        max_context_tokens=fields.size("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )


def kimi_linear(fields: Fields, name: str) -> ModelSpec:
    """Kimi Linear, and Kimi K3, whose language part is of this kind with wider gates and latent experts."""
    _require_layer_each(fields)
    linear, hidden = fields.part("linear_attn_config"), fields.size("hidden_size")
    attention = _latent(fields)
    kda = KimiDeltaAttention(
        num_heads=linear.size("num_heads"),
        head_dim=linear.size("head_dim"),
        conv_width=linear.size("short_conv_kernel_size"),
        full_rank_gate=linear.flag("use_full_rank_gate"),
    )
    latent = fields.size("routed_expert_hidden_size") if fields.has("routed_expert_hidden_size") else None
    if latent and not fields.flag("latent_moe_use_norm"):
        raise fields.refuse("latent experts without latent_moe_use_norm, which this kind's reader cannot express")
    # Attention residuals bring two more vectors to each layer.
    num_norms = 4 if fields.count("attn_res_block_size") else 2
    dense = DenseFfn(inner=fields.size("intermediate_size"))
    experts = MoeFfn(
        latent=latent,
        num_experts=fields.size("num_experts"),
        top_k=fields.size("num_experts_per_token"),
        inner=fields.size("moe_intermediate_size"),
        num_shared=fields.count("num_shared_experts"),
    )
    num_layers = fields.num_layers()
    full, num_dense = _full_layers(linear, num_layers), fields.count("first_k_dense_replace", highest=num_layers)
    pattern = [
        (attention if layer in full else kda, dense if layer <= num_dense else experts)
        for layer in range(1, num_layers + 1)
    ]
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=stacked(pattern, num_norm_params=num_norms * hidden),
        vocab_size=fields.size("vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        max_context_tokens=fields.size("model_max_length", "max_position_embeddings"),
        num_final_norm_params=hidden,
    )


def _full_layers(linear: Fields, num_layers: int) -> frozenset[int]:
    """Which layers, from 1, are not KDA."""
    full = frozenset(linear.sizes("full_attn_layers", lowest=1, highest=num_layers))
    if not full:
        raise linear.refuse("full_attn_layers is empty; this kind's reader needs one layer of full attention at least")
    if linear.has("kda_layers"):
        kda = linear.sizes("kda_layers", lowest=1, highest=num_layers)
        wrong = full.symmetric_difference(range(1, num_layers + 1)).symmetric_difference(kda)
        if wrong:
            raise linear.refuse(f"layer {min(wrong)} is in both of full_attn_layers and kda_layers, or in none")
    return full


def deepseek_v4_kind(fields: Fields, name: str) -> ModelSpec:
    # A part of head_dim.
    fields.built_in("qk_rope_head_dim")
    num_layers, ratios = fields.num_layers(), fields.sizes("compress_ratios")
    quantization = read_quantization(fields)
    if quantization is not None and quantization.storage is not FP8:
        raise fields.refuse(f"quantization to {quantization.storage.name}, which this kind's reader cannot express")
    # Released lists go on for the drafter's layers.
    if len(ratios) < num_layers:
        raise fields.refuse(f"compress_ratios has {len(ratios)} entries for {num_layers} layers")
    return deepseek_v4(
        name=name,
        hidden=fields.size("hidden_size"),
        ratios=ratios[:num_layers],
        num_hash_layers=fields.count("num_hash_layers", highest=num_layers),
        window=CompressedAttention(
            num_heads=fields.size("num_attention_heads"),
            head_dim=fields.size("head_dim"),
            q_rank=fields.size("q_lora_rank"),
            output_groups=fields.size("o_groups"),
            output_rank=fields.size("o_lora_rank"),
            window_tokens=fields.size("sliding_window"),
        ),
        indexer=Indexer(
            num_heads=fields.size("index_n_heads"),
            head_dim=fields.size("index_head_dim"),
            top_k=fields.size("index_topk"),
        ),
        experts=MoeFfn(
            num_experts=fields.size("n_routed_experts"),
            top_k=fields.size("num_experts_per_tok"),
            inner=fields.size("moe_intermediate_size"),
            num_shared=fields.count("n_shared_experts"),
        ),
        vocab_size=fields.size("vocab_size"),
        max_context_tokens=fields.size("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )
