"""The folder that llama.cpp's scripts read: what of a model's files is changed for them, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gguf_families import write_model, write_tokenizer
from serve.hive import write_adapter

from hivetune.errors import MachineNotFit, UsageError
from hivetune.release.gguf import OWN_QUANTS, QUANTS, find_quant
from hivetune.release.worker.to_gguf import (
    model_name,
    stage_adapter,
    tokenizer_settings,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = write_tokenizer(tmp_path)
    described = {"eos_ids": [tokenizer.token_to_id("<|im_end|>")], "pad_id": 1, "bos_id": None}
    (tmp_path / "hivetune.json").write_text(json.dumps(described))
    return tmp_path


def change(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **changes}))


def document_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return document


def settings_of(folder: Path) -> dict[str, Any]:
    return tokenizer_settings(folder, document_of(folder))


def test_ends_and_first_token_are_those_of_training(folder: Path) -> None:
    settings = settings_of(folder)
    assert (settings["eos_token"], settings["pad_token"], "bos_token" in settings) == (
        "<|im_end|>",
        "<|endoftext|>",
        False,
    )
    assert settings["add_prefix_space"] is False and settings["added_tokens_decoder"]["2"]["special"]
    # Llama 3's list begins with the end of a document, which no chat ever writes.
    change(folder, "hivetune.json", eos_ids=[1, 3])
    assert settings_of(folder)["eos_token"] == "<|im_end|>"
    change(folder, "hivetune.json", eos_ids=[])
    with pytest.raises(UsageError, match="never stop"):
        settings_of(folder)


@pytest.mark.parametrize("written", [True, False])
def test_a_first_token_is_added_only_where_the_template_writes_it(folder: Path, written: bool) -> None:
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [2], "tokens": ["<|im_start|>"]}},
    }
    change(folder, "tokenizer.json", post_processor=processor)
    change(folder, "hivetune.json", bos_id=2)
    template = "{{ bos_token }}" if written else "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert settings_of(folder)["add_bos_token"] is written


def test_the_name_is_the_bases_unless_llama_cpp_keys_tokens_on_it(folder: Path) -> None:
    """A Llama model that is called phi3 can't be loaded: llama.cpp looks for Phi-3's tokens by the name."""

    def named(name: str) -> str:
        change(folder, "hivetune.json", name=name)
        return model_name(folder)

    assert [named("smollm2-135m"), named("my-phi3-helpdesk")] == ["smollm2-135m", "my-phi-helpdesk"]
    # Some of Phi-4's tokens strip, but it has not all that llama.cpp asks a model of that name for.
    tokens = [{**token, "rstrip": True} for token in document_of(folder)["added_tokens"]]
    change(folder, "tokenizer.json", added_tokens=tokens)
    assert [named("Phi-4"), named("helpdesk")] == ["Phi-4", "helpdesk"]
    tokens += [{**tokens[0], "id": 900 + place, "content": text} for place, text in enumerate(("<unk>", "<s>", "</s>"))]
    change(folder, "tokenizer.json", added_tokens=tokens)
    assert [named("Phi-3-mini"), named("helpdesk")] == ["Phi-3-mini", "helpdesk (phi-3)"]


def test_a_rank_stabilised_scale_arrives_as_one_that_llama_cpp_knows(tmp_path: Path) -> None:
    """It divides by the rank; PEFT divides by the rank's root where the adapter says so."""
    write_model(tmp_path / "model", "llama")
    write_adapter(tmp_path / "model", tmp_path / "trained", 1)
    change(tmp_path / "trained", "adapter_config.json", use_rslora=True, lora_alpha=6)
    stage_adapter(tmp_path / "model", tmp_path / "trained", tmp_path / "staged")
    staged = json.loads((tmp_path / "staged" / "adapter_config.json").read_text())
    assert (staged["r"], staged["lora_alpha"]) == (4, pytest.approx(6 / 4**0.5 * 4))


def test_number_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_quant("Q8_0") == "q8_0"
    with pytest.raises(UsageError, match="choose one of f32"):
        find_quant("q4_km")
    with pytest.raises(MachineNotFit, match="llama-quantize"):
        find_quant("q4_k_m")
    program = tmp_path / "llama-quantize"
    program.write_text("#!/bin/sh\n")
    os.chmod(program, 0o700)
    assert find_quant("q4_k_m") == "q4_k_m"
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    assert not [name for name in QUANTS if f"`{name}`" not in text] and OWN_QUANTS.keys() < QUANTS.keys()
