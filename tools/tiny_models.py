"""Configs of tiny models: one size for every setting that makes a family large, and what single families need."""

from typing import Any

TOKENS = 320
# One size for every setting that makes a model large, whatever its family calls it; settings of other kinds stay.
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim_model", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_inner", "dim_ff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "v_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("vocab_size",), TOKENS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_n_groups", "n_groups", "chunk_size"), 8),
    **dict.fromkeys(("sliding_window",), 16),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "attention_kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("initializer_range",), 0.1),
}
# What single families need besides.
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": TOKENS, "hidden_size_per_layer_input": 8}
OWN: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3],
        **{
            f"{part}_config": {"hidden_size": 64, "hidden_size_global": 64, "intermediate_size": 96}
            | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
            for part in ("patcher", "encoder", "decoder", "global")
        },
    },
    "cpmant": {"prompt_types": 4, "prompt_length": 4},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 4, "head_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {**TWO_KINDS, **PER_LAYER, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": {**TWO_KINDS, **PER_LAYER},
    "gemma4_unified_text": {**TWO_KINDS, **PER_LAYER},
    "cohere_compass_text": {
        **TWO_KINDS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in TWO_KINDS["layer_types"]},
    },
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 8},
    "dots3_note_text": {"num_key_value_heads": 4},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        }
    },
}


def tiny_config(kind: str) -> Any:
    from transformers import AutoConfig

    names = {**AutoConfig.for_model(kind).to_dict(), **type(AutoConfig.for_model(kind)).attribute_map}
    latent = {"num_key_value_heads": 4} if "kv_lora_rank" in names else {}  # all heads share what is kept
    return AutoConfig.for_model(
        kind, **{**{k: v for k, v in TINY.items() if k in names}, **latent, **OWN.get(kind, {})}
    )
