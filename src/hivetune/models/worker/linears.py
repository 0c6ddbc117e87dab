"""The linear modules of a transformers model, those that get an adapter, and the sizes counted from them.

The count works for every family in the same way, so a new family can be planned without a formula of its own
(models/architecture.py).
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hivetune.config import LoraConfig
from hivetune.models.architecture import Linear, match_targets

# PEFT takes these names in an adapter for the experts of a fused tensor, whatever module they are of, and loads nothing
# else under them (peft/utils/transformers_weight_conversion.py).
NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# In these it takes the names of dense MLPs for experts' and does not load them: there attention is trained.
MLPS_UNLOADABLE = ("beam", "longcat_flash")
# By family: what its own code reads past the module, so that an adapter on it never has a say (PEFT refuses out_proj
# too), and what llama.cpp multiplies by without looking for an adapter, so that it would be lost when served.
NOT_ADAPTABLE: Mapping[str, tuple[str, ...]] = {
    **{kind: ("out_proj", "dt_proj") for kind in ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")},
    **dict.fromkeys(("jamba", "zamba"), ("dt_proj",)),
    "longcat_flash": ("classifier",),  # of its router; merged it would change what no adapter did
    # The effect of a tiny Gemma 4's adapter was 0.94 in llama.cpp.
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), ("per_layer_model_projection",)),
}
# They choose, as a router does of experts, and no gradient comes through that: which keys sparse attention sees, which
# bytes make a patch (BLT). Experts that are modules of their own stay frozen too.
FROZEN_PARTS = (".indexer.", ".patcher.", ".experts.")
USUAL_HEAD = 64  # of families that do not name their heads
# What configs call the number of experts that a token meets.
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_top_k", "top_k")


def find_linears(module: nn.Module, lora: LoraConfig) -> list[Linear]:
    """Return the linear modules that get an adapter, by full name. Raises UsageError as `match_targets`."""
    # Experts and the routers that choose them stay frozen, and where experts are fused, also the shared ones and dense
    # MLPs, whose names PEFT takes for theirs.
    head = _name_of_head(module)
    frozen = frozen_linears(module)
    linears = {name: linear for name, linear in linears_of(module).items() if name not in frozen}
    return [linears[name] for name in match_targets(linears, lora.target_modules, head=head)]


def linears_of(module: nn.Module) -> dict[str, Linear]:
    """Return full name -> linear module, for all but fused experts."""
    linears = {}
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            linears[name] = Linear(name, child.in_features, child.out_features)
        elif isinstance(child, Conv1D):  # GPT-2: its weight is stored [inputs, outputs]
            linears[name] = Linear(name, child.nx, child.nf)
    return linears


def find_experts(module: nn.Module) -> dict[str, Linear]:
    """Return name -> tensor of fused experts, described as linear modules, such as
    `model.layers.0.mlp.experts.gate_up_proj`.
    """
    linears = {}
    for name, child in module.named_modules():
        if _is_fused(child):
            for part in ("gate_up_proj" if child.has_gate else "up_proj", "down_proj"):
                experts, *sides = getattr(child, part).shape
                inputs, outputs = sides if child.is_transposed else reversed(sides)
                linears[f"{name}.{part}"] = Linear(f"{name}.{part}", inputs, outputs, experts=experts)
    return linears


def _is_fused(module: nn.Module) -> bool:
    """Return whether the module is transformers' collection of experts in one tensor (`use_experts_implementation`
    marks these).
    """
    return "is_transposed" in vars(module) and "has_gate" in vars(module)


def frozen_linears(module: nn.Module) -> set[str]:
    """Return the full names of the linear modules that `find_linears` leaves without an adapter."""
    kind = module.config.model_type
    has_fused = kind in MLPS_UNLOADABLE or any(map(_is_fused, module.modules()))
    ends = {*NOT_ADAPTABLE.get(kind, ()), *(NAMES_OF_EXPERTS if has_fused else ())}
    linears = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    routers = set[str]()
    for name, child in module.named_modules():
        parts = dict(child.named_children())
        if "experts" in parts or any(map(_is_fused, parts.values())):
            routers |= {f"{name}.{key}" for key, part in parts.items() if isinstance(part, nn.Linear)}
    chosen = (n for n in linears if n.rpartition(".")[2] in ends or any(part in n for part in FROZEN_PARTS))
    return routers.union(chosen)


def count_sizes(module: nn.Module) -> dict[str, Any]:
    """Return `sizes` of hivetune.json, the fields of an `Architecture`, for a module that may be on the meta device.
    `modules` is empty for a model without layers.
    """
    config = module.config.get_text_config()
    met = next((value for name in ACTIVE_EXPERTS if (value := _number(config, name, 0))), None)
    frozen, head = frozen_linears(module), _name_of_head(module)
    linears = {name: linear for name, linear in linears_of(module).items() if name != head}
    modules = [linear for name, linear in linears.items() if name not in frozen]
    modules += [replace(each, active=min(met or each.experts, each.experts)) for each in find_experts(module).values()]
    embedding = module.get_input_embeddings().weight
    hidden = _number(config, "hidden_size", int(embedding.shape[1]))
    heads = _number(config, "num_attention_heads", max(1, hidden // USUAL_HEAD))
    return {
        "family": config.model_type,
        "layers": _number(config, "num_hidden_layers", 1),
        "hidden": hidden,
        "ffn": max((linear.outputs for linear in modules), default=0),
        "heads": heads,
        "head_size": _number(config, "head_dim", max(1, hidden // heads)),
        "kv_heads": min(heads, _number(config, "num_key_value_heads", heads)),
        "vocabulary": int(embedding.shape[0]),
        "tied": head is not None and module.get_output_embeddings().weight is embedding,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "modules": [asdict(linear) for linear in modules],
        "other_weights": sum(linear.weights for name, linear in linears.items() if name in frozen),
    }


def _name_of_head(module: nn.Module) -> str | None:
    head = module.get_output_embeddings()
    return next((name for name, child in module.named_modules() if child is head), None)


def _number(config: Any, name: str, default: int) -> int:
    """Return a setting by its usual name, which transformers maps to the family's own; `default` if the family lacks
    it.
    """
    # Read from the plain values, since the attribute may differ by layer (Gemma 4's heads).
    value = config.to_dict().get(config.attribute_map.get(name, name))
    return value if isinstance(value, int) and value > 0 else default
