"""The kind of model that a config describes: a causal text model, or one that can't be trained here; and the text
part of a model that takes images or sound too, as a model of its own."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hivetune.errors import UsageError
from hivetune.models.prepared import TEXT_PART, WEIGHTS, WEIGHTS_INDEX
from hivetune.models.worker.weights import Stored, open_weights

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
    """Raise UsageError, in the words of its kind, for a transformers config that is not of a causal text model."""
    kind = config.model_type
    fault, hint = _other_kind(config, kind), _HINT
    if fault == "":
        return
    if "text_config" in config.sub_configs and not config.is_encoder_decoder:
        hint = f"ask for its text part, which is trained alone: model: {name}{TEXT_PART}"
    raise UsageError(f"model {name} ({kind}) {fault}; only causal text models are trained", hint=hint)


def _other_kind(config: Any, kind: str) -> str:
    """Return the model's kind, as the rest of a sentence; "" for a causal text model."""
    if kind in NOT_ALONE:
        return NOT_ALONE[kind]
    parts = {"vision_config": "images", "image_config": "images", "audio_config": "sound", "vq_config": "images"}
    senses = sorted({sense for part, sense in parts.items() if config.to_dict().get(part)})
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


# The text part of a model that takes images or sound too, as a model of its own: its config and its tensors alone.

# What precedes the names of the text part's tensors, by the two generations of transformers; alone it is "model.".
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "language_model.")
HEADS = ("lm_head.", "language_model.lm_head.")


def take_text_part(work: Path, config: Any, name: str) -> None:
    """Write the text part of the model folder `work` over it. Raises UsageError for a model that has none."""
    text = config.get_text_config()
    if text is config:
        raise UsageError(f"model {name}: {config.model_type} is already a text model", hint="leave :text out")
    tensors = open_weights(work)
    prefix = next((prefix for prefix in TEXT_PREFIXES if any(key.startswith(prefix) for key in tensors)), None)
    if prefix is None:
        raise UsageError(f"model {name}: the tensors of its text part can't be distinguished from the others")
    text_tensors = {
        f"model.{key.removeprefix(prefix)}": stored for key, stored in tensors.items() if key.startswith(prefix)
    }
    for head in HEADS:
        text_tensors |= {f"lm_head.{key.removeprefix(head)}": at for key, at in tensors.items() if key.startswith(head)}
    text.tie_word_embeddings = config.tie_word_embeddings
    for kind in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, kind, None) is None:
            setattr(text, kind, getattr(config, kind, None))
    _write(work / f".{WEIGHTS}", text_tensors)
    for file in {stored.file.path for stored in tensors.values()} | {work / WEIGHTS_INDEX}:
        file.unlink(missing_ok=True)
    os.rename(work / f".{WEIGHTS}", work / WEIGHTS)
    text.save_pretrained(work)


def _write(path: Path, tensors: dict[str, Stored]) -> None:
    """Write a safetensors file of the same bytes under other names."""
    header, end = {}, 0
    for key, stored in tensors.items():
        end += stored.size_bytes
        header[key] = {"dtype": stored.kind, "shape": stored.shape, "data_offsets": [end - stored.size_bytes, end]}
    content = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    content += b" " * (-len(content) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        for stored in tensors.values():
            file.write(stored.raw().data)
