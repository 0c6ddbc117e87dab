"""The text part of a model that takes images or sound too, as a model of its own: its config and its tensors alone."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from hivetune.errors import UsageError
from hivetune.models.prepared import WEIGHTS, WEIGHTS_INDEX
from hivetune.models.worker.weights import Stored, open_weights

# What precedes the names of the text part's tensors, by the two generations of transformers; alone it is "model.".
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "language_model.")
HEADS = ("lm_head.", "language_model.lm_head.")


def take_text_part(work: Path, config: Any, name: str) -> None:
    """Write the text part of the model folder `work` over it. Raises UsageError for a model that has none."""
    text = config.get_text_config()
    if text is config:
        raise UsageError(f"model {name}: {config.model_type} is a text model as it is", hint="leave :text out")
    tensors = open_weights(work)
    prefix = next((prefix for prefix in TEXT_PREFIXES if any(key.startswith(prefix) for key in tensors)), None)
    if prefix is None:
        raise UsageError(f"model {name}: the tensors of its text part can't be told from the others")
    kept = {f"model.{key.removeprefix(prefix)}": stored for key, stored in tensors.items() if key.startswith(prefix)}
    for head in HEADS:
        kept |= {f"lm_head.{key.removeprefix(head)}": at for key, at in tensors.items() if key.startswith(head)}
    text.tie_word_embeddings = config.tie_word_embeddings
    for kind in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, kind, None) is None:
            setattr(text, kind, getattr(config, kind, None))
    _write(work / f".{WEIGHTS}", kept)
    for file in {stored.file.path for stored in tensors.values()} | {work / WEIGHTS_INDEX}:
        file.unlink(missing_ok=True)
    os.rename(work / f".{WEIGHTS}", work / WEIGHTS)
    text.save_pretrained(work)


def _write(path: Path, tensors: dict[str, Stored]) -> None:
    """A safetensors file of the same bytes under other names."""
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
