"""Ways to spoil a model folder: its tensors, its settings, its tokenizer, the bytes of its files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


def weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()  # it may have a second name
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    settings = {**json.loads(path.read_text()), **changes}
    path.unlink()
    path.write_text(json.dumps({name: value for name, value in settings.items() if value != "removed"}))


def renamed(tensors: Tensors, old: str, new: str) -> None:
    for name in list(tensors):
        tensors[name.replace(old, new, 1)] = tensors.pop(name)


def pop(tensors: Tensors, part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


def shards(folder: Path) -> dict[str, str]:
    """The model in shards of 20 KB; tensor -> file."""
    module = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size="20KB")
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def forget_in_shard(folder: Path) -> None:
    file = folder / shards(folder)[UP]
    tensors = load_file(file)
    del tensors[UP]
    file.unlink()
    save_file(tensors, file)


def forget_shard(folder: Path) -> None:
    """Its index says nothing of one file, as when a download ended in the middle and the index was made anew."""
    known = shards(folder)
    kept = {name: file for name, file in known.items() if file != known[UP]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": kept}))


def template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)


def tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def grow(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    top = max(max(vocabulary.values()), *(token["id"] for token in content["added_tokens"]))
    vocabulary |= {f"\u0436{number}": top + 1 + number for number in range(30)}


def bytes_of(folder: Path, change: Callable[[bytearray], bytearray]) -> None:
    path = folder / "model.safetensors"
    content = change(bytearray(path.read_bytes()))
    path.unlink()
    path.write_bytes(content)
