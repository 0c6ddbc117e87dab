"""The sizes of a model, counted from the modules that transformers builds of it, for the plan (models/architecture.py).

For every family alike: no formula is needed to plan one that is new.
"""

from dataclasses import asdict, replace
from typing import Any

from torch import nn

from hivetune.config import LoraConfig
from hivetune.models.architecture import USUAL_HEAD, Linear
from hivetune.models.worker.linears import find_linears, linears_of

# What configs call the number of experts that a token meets.
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_top_k", "top_k")


def count_sizes(module: nn.Module) -> dict[str, Any]:
    """`sizes` of hivetune.json: the fields of an `Architecture`, of a bare module, which may be on the meta device."""
    config = module.config.get_text_config()
    met = next((value for name in ACTIVE_EXPERTS if (value := _number(config, name, 0))), None)
    modules = [_with_active(linear, met) for linear in find_linears(module, LoraConfig())]
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


def _with_active(linear: Linear, met: int | None) -> Linear:
    return replace(linear, active=min(met or linear.experts, linear.experts))


def _number(config: Any, name: str, default: int) -> int:
    """Of a setting by its usual name, which transformers maps to the family's own; families without it have none.

    From the plain values: where layers differ (Gemma 4's heads), the attribute is not one number.
    """
    value = config.to_dict().get(config.attribute_map.get(name, name))
    return value if isinstance(value, int) and value > 0 else default
