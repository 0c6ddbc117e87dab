"""The text part of a model of images and text: refused unless asked for, and the same logits when it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hivetune.errors import UsageError
from hivetune.models.prepared import folder_for, read_prepared
from hivetune.models.worker.prepare_model import prepare_model

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({}, VISION),
    "qwen3_5": (
        {**LINEAR, "layer_types": ["linear_attention", "full_attention"]},
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_text_part_alone(kind: str, tiny_source: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_source, tmp_path / "source"))
    (source / "generation_config.json").unlink()
    known = json.loads((source / "config.json").read_text())
    ids = {"vocab_size": known["vocab_size"], "eos_token_id": known["eos_token_id"], "bos_token_id": None}
    text, vision = CASES[kind]
    config = AutoConfig.for_model(kind, text_config={**TEXT, **ids, "pad_token_id": 0, **text}, vision_config=vision)
    config.eos_token_id = known["eos_token_id"]
    torch.manual_seed(1)
    module = AutoModelForImageTextToText.from_config(config).eval()
    module.save_pretrained(source)
    with pytest.raises(UsageError, match="takes images besides text") as caught:
        prepare_model(str(source), tmp_path / "whole")
    assert f"{source}:text" in caught.value.hint
    target = folder_for(f"{source}:text")
    prepare_model(f"{source}:text", target)
    assert read_prepared(target).kind == "folder"
    alone = AutoModelForCausalLM.from_pretrained(target).eval()
    assert alone.config.model_type == f"{kind}_text"
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(alone(input_ids=tokens).logits, module(input_ids=tokens).logits, rtol=0, atol=1e-5)


def test_a_text_model_has_no_part_to_ask_for(tiny_source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no separate text part"):
        prepare_model(f"{tiny_source}:text", tmp_path / "prepared")
