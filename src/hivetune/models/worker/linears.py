"""The linear modules of a transformers model: which exist, which get an adapter, and the sizes that are counted from
them."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hivetune.config import LoraConfig
from hivetune.models.architecture import USUAL_HEAD, Linear, match_targets

# PEFT takes these names in an adapter for the experts of a fused tensor, whatever module they are of, and loads nothing
# else under them (peft/utils/transformers_weight_conversion.py).
NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")

# What a family's own code reads past the module, so that an adapter on it never has a say; PEFT refuses out_proj too.
READ_PAST: Mapping[str, tuple[str, ...]] = {
    **{kind: ("out_proj", "dt_proj") for kind in ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")},
    **dict.fromkeys(("jamba", "zamba"), ("dt_proj",)),
    "longcat_flash": ("classifier",),  # of its router; merged it would change what no adapter did
}
# llama.cpp multiplies by these without looking for an adapter, so one that was trained there would be lost when served
# (the effect of a tiny Gemma 4's adapter was 0.94).
WITHOUT_ADAPTER_IN_LLAMA_CPP: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("gemma3n_text", "gemma4_text"), ("per_layer_model_projection",)
)
# PEFT takes the names of their dense MLPs for experts', and does not load them: there attention is trained.
MLPS_UNLOADABLE = ("beam", "longcat_flash")
# They choose, as a router does of experts, and no gradient comes through that: which keys sparse attention sees, which
# bytes make a patch (BLT).
CHOOSING = (".indexer.", ".patcher.")


def find_linears(module: nn.Module, lora: LoraConfig) -> list[Linear]:
    """Return the linear modules that get an adapter, by full name. Raises UsageError as `match_targets`."""
    head, frozen = module.get_output_embeddings(), frozen_linears(module) | set(find_experts(module))
    head_name = next((name for name, child in module.named_modules() if child is head), None)
    linears = {name: linear for name, linear in linears_of(module).items() if name not in frozen}
    return [linears[name] for name in match_targets(linears, lora.target_modules, head=head_name)]


def linears_of(module: nn.Module) -> dict[str, Linear]:
    """Return every linear module by its full name, fused experts too."""
    linears = find_experts(module)
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            linears[name] = Linear(name, child.in_features, child.out_features)
        elif isinstance(child, Conv1D):  # GPT-2: its weight is stored [inputs, outputs]
            linears[name] = Linear(name, child.nx, child.nf)
    return linears


def is_fused(module: nn.Module) -> bool:
    """Return whether it is transformers' collection of experts in one tensor (`use_experts_implementation` marks
    them)."""
    return "is_transposed" in vars(module) and "has_gate" in vars(module)


def find_experts(module: nn.Module) -> dict[str, Linear]:
    """Return each tensor of each collection of fused experts as linear modules of one name, such as
    `model.layers.0.mlp.experts.gate_up_proj`."""
    linears = {}
    for name, child in module.named_modules():
        if is_fused(child):
            for part in ("gate_up_proj" if child.has_gate else "up_proj", "down_proj"):
                shape = getattr(child, part).shape
                inputs, outputs = (shape[1], shape[2]) if child.is_transposed else (shape[2], shape[1])
                linears[f"{name}.{part}"] = Linear(f"{name}.{part}", inputs, outputs, experts=shape[0])
    return linears


def frozen_linears(module: nn.Module) -> set[str]:
    """Return the full names of the linear modules, besides fused experts, that get no adapter.

    Experts that are modules of their own stay frozen too, and routers, which decide which experts a token meets. Where
    experts are fused, PEFT takes the names of shared experts and dense MLPs for theirs. Others have weights that are
    read past the module, or that llama.cpp serves without an adapter.
    """
    kind = module.config.model_type
    frozen, fused = set(), kind in MLPS_UNLOADABLE
    for name, child in module.named_modules():
        parts = dict(child.named_children())
        fused = fused or is_fused(child)
        if "experts" in parts or any(map(is_fused, parts.values())):
            frozen |= {f"{name}.{key}" for key, part in parts.items() if isinstance(part, nn.Linear)}
    left_out = {*READ_PAST.get(kind, ()), *WITHOUT_ADAPTER_IN_LLAMA_CPP.get(kind, ())}
    left_out |= set(NAMES_OF_EXPERTS if fused else ())
    linears = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    chosen = {name for name in linears if any(part in name for part in (*CHOOSING, ".experts."))}
    return frozen | chosen | {name for name in linears if name.rpartition(".")[2] in left_out}


# The sizes of a model, counted from the modules that transformers builds of it, for the plan
# (models/architecture.py).
#
# For every family alike: no formula is needed to plan one that is new.

# What configs call the number of experts that a token meets.
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_top_k", "top_k")


def count_sizes(module: nn.Module) -> dict[str, Any]:
    """Return `sizes` of hivetune.json, the fields of an `Architecture`, of a bare module, which may be on the meta
    device."""
    config = module.config.get_text_config()
    met = next((value for name in ACTIVE_EXPERTS if (value := _number(config, name, 0))), None)
    linears = [*find_linears(module, LoraConfig()), *find_experts(module).values()]
    modules = [replace(each, active=min(met or each.experts, each.experts)) for each in linears]
    adapted = {linear.name for linear in modules}
    head = module.get_output_embeddings()
    others = [
        linear
        for name, linear in linears_of(module).items()
        if linear.experts == 1 and name not in adapted and module.get_submodule(name) is not head
    ]
    embedding = module.get_input_embeddings().weight
    hidden = _number(config, "hidden_size", int(embedding.shape[1]))
    heads = _number(config, "num_attention_heads", max(1, hidden // USUAL_HEAD))
    return {
        "family": config.model_type,
        "layers": _number(config, "num_hidden_layers", 1),
        "hidden": hidden,
        "ffn": max(linear.outputs for linear in modules),
        "heads": heads,
        "head_size": _number(config, "head_dim", max(1, hidden // heads)),
        "kv_heads": min(heads, _number(config, "num_key_value_heads", heads)),
        "vocabulary": int(embedding.shape[0]),
        "tied": head is not None and head.weight is embedding,
        "norm_parameters": 0,
        "modules": [asdict(linear) for linear in modules],
        "counted": sum(parameter.numel() for parameter in module.parameters()),
        "other_weights": sum(linear.weights for linear in others),
    }


def _number(config: Any, name: str, default: int) -> int:
    """Return a setting by its usual name, which transformers maps to the family's own, or `default` for families
    without it.

    It is read from the plain values, since the attribute may differ by layer (Gemma 4's heads).
    """
    value = config.to_dict().get(config.attribute_map.get(name, name))
    return value if isinstance(value, int) and value > 0 else default
