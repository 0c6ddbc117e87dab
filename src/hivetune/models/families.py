"""The one table of model families. To add a family, add its entry to `FAMILIES`; plan and fast path read it.

A family is transformers' `model_type`. Each entry describes its differences from Llama, taken from the models in
transformers and the architectures in llama.cpp. Data only: the arithmetic is where it is needed (models/architecture.py
counts, train/worker/model/fast/ computes, llama.cpp's converter translates). A family that is not listed trains on the
general path, and its modules are counted when it is prepared (models/worker/linears.py).

Widths: hidden D, queries H * E, keys G * E (and values), MLP F; H query heads, G key-value heads, E channels a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Width = Literal["hidden", "q", "kv", "ffn"]
GroupName = Literal["qkv", "o", "gate_up", "down"]


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear module of a decoder layer; `name` below `model.layers.I.`.

    outputs: the widths whose sum is the number of its outputs. group: the merged matrix of the fast path that contains
    it. bias: the setting that gives it a bias (`attention_bias`, `mlp_bias`; "qkv": also `Family.qkv_bias`), or
    "never".
    """

    name: str
    inputs: Width
    outputs: tuple[Width, ...]
    group: GroupName
    bias: Literal["qkv", "attention", "mlp", "never"]


SEPARATE = (
    Projection("self_attn.q_proj", "hidden", ("q",), "qkv", "qkv"),
    Projection("self_attn.k_proj", "hidden", ("kv",), "qkv", "qkv"),
    Projection("self_attn.v_proj", "hidden", ("kv",), "qkv", "qkv"),
    Projection("self_attn.o_proj", "q", ("hidden",), "o", "attention"),
    Projection("mlp.gate_proj", "hidden", ("ffn",), "gate_up", "mlp"),
    Projection("mlp.up_proj", "hidden", ("ffn",), "gate_up", "mlp"),
    Projection("mlp.down_proj", "ffn", ("hidden",), "down", "mlp"),
)
FUSED = (
    Projection("self_attn.qkv_proj", "hidden", ("q", "kv", "kv"), "qkv", "never"),
    Projection("self_attn.o_proj", "q", ("hidden",), "o", "never"),
    Projection("mlp.gate_up_proj", "hidden", ("ffn", "ffn"), "gate_up", "never"),
    Projection("mlp.down_proj", "ffn", ("hidden",), "down", "never"),
)

# Norms of a layer: what they are for, and their name below `model.layers.I.`. Llama calls the norm before the MLP
# `post_attention_layernorm`; Gemma 2 and 3 give that name to the one after attention.
PRE_NORMS = {"input": "input_layernorm", "mlp": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "input": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
POST_NORMS = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
HEAD_NORMS = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of a family from Llama. `head_dim`, `tied`, `activation` and `query_scalar` are the defaults of
    settings that a config.json may leave out.

    head_dim: None means hidden / heads. tied: the output embedding is the input embedding. qkv_bias: q, k and v always
    have a bias. head_norms: there are norms of E channels on queries and keys; wide_norms: of all their channels
    together. sandwich_norms: there are norms after attention and MLP too; post_norms: only there. eps: what norms add
    to the mean square. norm_plus_one: the stored weight is the distance from 1. scaled_embedding: embeddings are
    multiplied by sqrt(hidden). multipliers: the config has factors for embeddings, layer outputs, scores and logits.
    gelu_is_tanh: "gelu" means its tanh approximation. query_scalar: scores are divided by the square root of
    `query_pre_attn_scalar`. softcaps: `attn_logit_softcapping` and `final_logit_softcapping` are applied. sliding: the
    layers with an attention window: all, those that the config names, every second (the even ones), or all but every
    sixth. local_rope: layers with a window use `rope_local_base_freq`. no_rope_interval: every layer whose number is a
    multiple of this has no rotation.
    """

    head_dim: int | None = None
    tied: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    wide_norms: bool = False
    sandwich_norms: bool = False
    post_norms: bool = False
    eps: float = 1e-6
    norm_plus_one: bool = False
    scaled_embedding: bool = False
    multipliers: bool = False
    activation: str = "silu"
    gelu_is_tanh: bool = False
    query_scalar: int | None = None
    softcaps: bool = False
    sliding: Literal["never", "always", "asked for", "alternating", "all but each sixth"] = "never"
    local_rope: bool = False
    no_rope_interval: int | None = None
    projections: tuple[Projection, ...] = SEPARATE

    @property
    def norms(self) -> Mapping[str, str]:
        """Return the name of each norm of a layer, by its place in the layer."""
        norms = POST_NORMS if self.post_norms else SANDWICH_NORMS if self.sandwich_norms else PRE_NORMS
        return {**norms, **HEAD_NORMS} if self.head_norms or self.wide_norms else norms


LLAMA = Family()
GELU = "gelu_pytorch_tanh"
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(sliding="always"),
    "granite": Family(multipliers=True),
    "olmo2": Family(wide_norms=True, post_norms=True, eps=1e-5),
    "smollm3": Family(tied=True, sliding="asked for", no_rope_interval=4),
    "qwen2": Family(qkv_bias=True, sliding="asked for"),
    "qwen3": Family(head_norms=True, head_dim=128, sliding="asked for"),
    "phi3": Family(projections=FUSED, sliding="always"),
    "gemma": Family(
        tied=True,
        head_dim=256,
        norm_plus_one=True,
        scaled_embedding=True,
        activation=GELU,
        # Its older checkpoints say "gelu" and were trained with the tanh form (huggingface/transformers#29402).
        gelu_is_tanh=True,
    ),
    "gemma2": Family(
        tied=True,
        head_dim=256,
        sandwich_norms=True,
        norm_plus_one=True,
        scaled_embedding=True,
        activation=GELU,
        query_scalar=256,
        softcaps=True,
        sliding="alternating",
    ),
    "gemma3_text": Family(
        tied=True,
        head_dim=256,
        head_norms=True,
        sandwich_norms=True,
        norm_plus_one=True,
        scaled_embedding=True,
        activation=GELU,
        query_scalar=256,
        softcaps=True,
        sliding="all but each sixth",
        local_rope=True,
    ),
}
