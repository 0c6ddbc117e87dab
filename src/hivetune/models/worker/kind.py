"""What kind of model a config describes: a causal text model, or one that can't be trained here."""

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hivetune.errors import UsageError
from hivetune.models.prepared import TEXT_PART

# Causal by their mapping in transformers, and still no text models of their own.
NOT_ALONE = {
    "blt": "reads bytes in patches that a second model inside it chooses, and PEFT can't tell their modules apart",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "drafts for another model, whose keys and values it reads, and writes nothing alone",
    ),
}
_HINT = "choose a causal language model, such as Qwen/Qwen2.5-0.5B-Instruct"


def check_kind(config: Any, name: str) -> None:
    """Raises UsageError, in the words of its kind, for a transformers config that is not of a causal text model."""
    kind = config.model_type
    what, hint = _other_kind(config, kind), _HINT
    if what == "":
        return
    if "text_config" in config.sub_configs and not config.is_encoder_decoder:
        hint = f"ask for its text part, which is trained alone: model: {name}{TEXT_PART}"
    raise UsageError(f"model {name} ({kind}) {what}; only causal text models are trained", hint=hint)


def _other_kind(config: Any, kind: str) -> str:
    """What the model is instead, as the rest of a sentence; "" for a causal text model."""
    if kind in NOT_ALONE:
        return NOT_ALONE[kind]
    senses = sorted(_senses(config.to_dict()))
    if senses or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return f"takes {' and '.join(senses) or 'images'} besides text"
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder: it reads a whole text before it writes one"
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True)
    if is_encoder or (kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return "is an encoder: each token sees those that follow"
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ""
    if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "is an encoder-decoder: it reads a whole text before it writes one"
    return "is not a language model"


def _senses(config: Mapping[str, Any]) -> set[str]:
    """What a composite config has a part for, besides text."""
    parts = {"vision_config": "images", "image_config": "images", "audio_config": "sound", "vq_config": "images"}
    return {sense for part, sense in parts.items() if config.get(part)}
