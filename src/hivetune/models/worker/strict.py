"""The check that no weight is invented: a folder has exactly the weights of the causal model in its config.json.

Before that, configs of other kinds of models are refused. If a model also reads images or sound, its text part can be
extracted as a model of its own.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from hivetune.base.disk import read_json
from hivetune.errors import UsageError
from hivetune.models.architecture import MAX_LAYERS
from hivetune.models.prepared import TEXT_PART, WEIGHTS, WEIGHTS_INDEX, all_settings
from hivetune.models.worker.linears import ACTIVE_EXPERTS, count_sizes, find_experts
from hivetune.models.worker.weights import open_weights, write_weights

# Tensors that a checkpoint may hold beyond the model's own, besides those that transformers itself names for the family
# (heads that predict further tokens, old buffers of positions): none of them is used, and none can be trained.
_LEGAL = re.compile(
    r"(^|\.)(attn|attention|self_attention)\.(masked_)?bias$"  # a causal mask, a buffer of GPT-2 and its kin
    r"|rotary_emb\.(inv_freq|cos_cached|sin_cached)$"  # rotations, computed from the config
    r"|^(v_head|value_head|reward_head)\."  # of a reward model beside the language model
)
# Settings that say how many modules there are: a made-up number would cost all memory before it is compared.
_COUNTS = re.compile(r"(num|n)_(\w+_)?(layers?|experts|blocks)|\w+_layers")
# Bases of rotations: at 0 every angle is infinite.
_POSITIVE = ("rope_theta", "rope_local_base_freq")
_NAMED = 3
_HINT = "download or convert it again; config.json and *.safetensors have to be of one model"
# Causal by their mapping in transformers, and still no text models of their own.
NOT_ALONE = {
    "blt": "reads bytes in patches that a second model inside it chooses, and PEFT can't tell their modules apart",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "drafts for another model, whose keys and values it reads, and writes nothing alone",
    ),
}
# What precedes the names of the text part's tensors, by the two generations of transformers; alone it is "model.".
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "language_model.")
HEADS = ("lm_head.", "language_model.lm_head.")


# The config.


def read_config(folder: Path, name: str) -> Any:
    """Return transformers' config of a folder. Raises UsageError if transformers can't read it."""
    for setting, value in all_settings(read_json(folder / "config.json")):
        if not isinstance(value, int | float):
            continue
        if _COUNTS.fullmatch(setting) and value > MAX_LAYERS:
            raise _wrong(name, f"config.json says {setting} {value}; at most {MAX_LAYERS} are supported")
        if setting in _POSITIVE and value <= 0:
            raise _wrong(name, f"config.json says {setting} {value}; it has to be above 0")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 (a config that lies fails anywhere in a model's code, with any exception)
        raise _unbuildable(name, error) from None


def check_kind(config: Any, name: str) -> None:
    """Raise UsageError for a transformers config that is not of a causal text model."""
    kind = config.model_type
    parts = {"vision_config": "images", "image_config": "images", "audio_config": "sound", "vq_config": "images"}
    senses = sorted({sense for part, sense in parts.items() if config.to_dict().get(part)})
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True)
    if kind in NOT_ALONE:
        fault = NOT_ALONE[kind]
    elif senses or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        fault = f"takes {' and '.join(senses) or 'images'} besides text"
    elif config.is_encoder_decoder or is_encoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        fault = "is not a causal language model, which writes on from a text"
    else:
        return
    hint = "choose one such as Qwen/Qwen2.5-0.5B-Instruct"
    if "text_config" in config.sub_configs and not config.is_encoder_decoder:
        hint = f"ask for its text part, which is trained alone: model: {name}{TEXT_PART}"
    raise UsageError(f"model {name} ({kind}) {fault}; only causal text models are trained", hint=hint)


def take_text_part(work: Path, config: Any, name: str) -> None:
    """Replace the model in `work` that also reads images or sound by its text part: config and tensors. Raises
    UsageError for a model without one.
    """
    text = config.get_text_config()
    if text is config:
        raise UsageError(f"model {name}: {config.model_type} has no separate text part", hint="leave :text out")
    stored = open_weights(work)
    prefix = next((prefix for prefix in TEXT_PREFIXES if any(key.startswith(prefix) for key in stored)), None)
    if prefix is None:
        raise UsageError(f"model {name}: the tensors of its text part can't be told from the others: use a text model")
    names = {prefix: "model.", **dict.fromkeys(HEADS, "lm_head.")}
    tensors = {
        alone + key.removeprefix(inside): stored[key]
        for inside, alone in names.items()
        for key in stored
        if key.startswith(inside)
    }
    # The whole model's config may have what the text part's lacks.
    text.tie_word_embeddings = config.tie_word_embeddings
    for kind in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, kind, None) is None:
            setattr(text, kind, getattr(config, kind, None))
    described = {key: (tensor.kind, tensor.shape) for key, tensor in tensors.items()}
    write_weights(work / f".{WEIGHTS}", described, lambda key: tensors[key].raw().data)
    for file in {tensor.file.path for tensor in stored.values()} | {work / WEIGHTS_INDEX}:
        file.unlink(missing_ok=True)
    os.rename(work / f".{WEIGHTS}", work / WEIGHTS)
    text.save_pretrained(work)


# The weights.


def check_against_config(folder: Path, name: str) -> dict[str, Any]:
    """Return `sizes` of hivetune.json.

    Raises UsageError, naming tensors, for weights of another model than config.json describes, and for a config that
    describes no model.
    """
    # transformers fills missing weights with random numbers and leaves out unknown ones, with a warning. Here both are
    # refused, by its own account of what it read. On torch's meta device it reads names and shapes without memory, in a
    # second for any size.
    try:
        module, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            device_map={"": "meta"},
            experts_implementation="eager",  # torch's grouped products have rules of their own on the meta device
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, not read
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except Exception as error:  # noqa: BLE001 (as above)
        if "conversion of the weights" not in str(error):
            raise _unbuildable(name, error) from None
        fault = "its tensors can't be combined: one of a group, such as an expert's, is missing or of another shape"
        raise _wrong(name, fault) from None
    refuse_invented(loading_info, name)
    stored = open_weights(folder)
    for key, value in module.named_parameters():
        if key in stored and stored[key].kind == "I64" and value.is_floating_point():
            raise _wrong(name, f"{key} contains integers, but config.json describes floating-point weights")
    # transformers keeps both of two tied tensors that differ, most other programs one of them.
    for key, other in module.all_tied_weights_keys.items():
        if key in stored and other in stored and not np.array_equal(stored[key].raw(), stored[other].raw()):
            hint = "set tie_word_embeddings to false in a local copy, if its publisher says that they differ"
            raise _wrong(name, f"config.json ties {key} to {other}, but the weights have two different tensors", hint)
    # A token has to be sent to an expert, and to no more than there are.
    settings = module.config.get_text_config().to_dict()
    setting = next((name for name in ACTIVE_EXPERTS if isinstance(settings.get(name), int)), None)
    for linear in find_experts(module).values() if setting else ():
        if not 1 <= settings[setting] <= linear.experts:
            raise _wrong(name, f"config.json says {setting} {settings[setting]}, of {linear.experts} experts")
    # A whole forward pass of shapes finds what building the model does not: heads that do not divide a width. Code that
    # looks at values, which the meta device does not have, is not the folder's fault.
    try:
        module(input_ids=torch.zeros(1, 4, dtype=torch.int64, device="meta"), use_cache=False)
    except Exception as error:  # noqa: BLE001 (as above)
        if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
            raise _unbuildable(name, error) from None
    sizes = count_sizes(module)
    if not sizes["modules"]:
        raise _wrong(name, "config.json describes a model without layers")
    return sizes


def refuse_invented(loading_info: Mapping[str, Any], name: str) -> None:
    """Raise UsageError if transformers' `output_loading_info` lists weights that were missing, unknown or of another
    shape.
    """
    if loading_info["missing_keys"]:
        raise _wrong(name, f"its weights lack {_some(loading_info['missing_keys'])}")
    if loading_info["mismatched_keys"]:
        key, stored, needed = min(loading_info["mismatched_keys"])
        raise _wrong(name, f"{key} is {list(stored)}, but config.json requires {list(needed)}")
    if unknown := [key for key in loading_info["unexpected_keys"] if not _LEGAL.search(key)]:
        raise _wrong(name, f"its weights have {_some(unknown)}, which the model of config.json does not have")


def _unbuildable(name: str, error: Exception) -> UsageError:
    lines = str(error).strip().splitlines() or ["no words"]
    hint = "compare it with the config.json of the model's publisher, or update transformers if the model is newer"
    reason = f"{type(error).__name__}: {lines[0][:300]}"
    return _wrong(name, f"transformers can't build a model from config.json ({reason})", hint)


def _wrong(name: str, fault: str, hint: str = _HINT) -> UsageError:
    return UsageError(f"model {name}: {fault}", hint=hint)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more
