"""Wrong model folders: damaged, lying, of other kinds. None is ever trained: each is refused in words about its cause.

A case for each reason: what downloads, disks and conversions do, and what was made to deceive. They are refused when
they are prepared, or, if only running them tells, when they are loaded.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from spoil import (
    UP,
    Tensors,
    bytes_of,
    edit,
    forget_in_shard,
    forget_shard,
    grow,
    pop,
    renamed,
    shards,
    template,
    tokenizer,
    weights,
)  # fmt: skip
from train.worker.models import load_any
from transformers import AutoConfig

from hivetune.errors import UsageError
from hivetune.models.worker.prepare_model import prepare_model
from hivetune.train.worker.model.protocol import LoraModel

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.15,
}  # fmt: skip
WHISPER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
WHISPER |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
# Class in transformers, model_type, settings, and for those of other kinds the words of the refusal.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "qwen2": ("CausalLM", "qwen2", {}, ""),
    "mixtral": ("CausalLM", "mixtral", {"num_local_experts": 4}, ""),
    "qwen3_moe": ("CausalLM", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, ""),
    "phi3": ("CausalLM", "phi3", {}, ""),
    "gpt2": ("CausalLM", "gpt2", {"n_positions": 64}, ""),
    "bert": ("MaskedLM", "bert", {}, "not a causal language model"),
    "roberta": ("CausalLM", "roberta", {}, "not a causal language model"),
    "bidirectional": ("CausalLM", "gemma3_text", {"use_bidirectional_attention": True}, "is not causal"),
    "xlnet": ("CausalLM", "xlnet", {"n_head": 4, "d_model": 32, "d_inner": 48, "n_layer": 2}, "is not causal"),
    "t5": (
        "Seq2SeqLM",
        "t5",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "not a causal language model",
    ),
    "whisper": ("SpeechSeq2Seq", "whisper", WHISPER, "not a causal language model"),
    "classifier": ("SequenceClassification", "llama", {"tie_word_embeddings": True}, "have score.weight"),
    "vit": ("ImageClassification", "vit", {}, "not a causal language model"),
}
GOOD = [name for name, (_, _, _, refused) in FAMILIES.items() if not refused]
UNBUILDABLE = "transformers can't build a model from config.json"


@pytest.fixture(scope="session")
def whole(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A whole folder of each kind, with the same tokenizer; "llama" has tied embeddings."""

    @cache
    def make(name: str) -> Path:
        if name == "llama":
            return tiny_source
        made = Path(shutil.copytree(tiny_source, tmp_path_factory.mktemp("whole") / "model"))
        (made / "generation_config.json").unlink(missing_ok=True)
        known = json.loads((made / "config.json").read_text())
        class_name, kind, extra, _ = FAMILIES[name]
        ids = {"vocab_size": known["vocab_size"], "eos_token_id": known["eos_token_id"], "bos_token_id": None}
        torch.manual_seed(5)
        config = AutoConfig.for_model(kind, **{**SIZES, **ids, **extra})
        if kind == "vit":
            config.image_size, config.patch_size = 16, 8
        getattr(transformers, f"AutoModelFor{class_name}").from_config(config).save_pretrained(made)
        return made

    return make


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    return lambda folder: weights(folder, change)


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, **changes)


def without(part: str) -> Callable[[Path], object]:
    return tensors(lambda t: pop(t, part))


def changed(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return tensors(lambda t: t.update({key: how(t[key]) for key in [key for key in t if name in key]}))


def indexed(weight_map: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        known = shards(folder)
        index = {"metadata": {}, "weight_map": weight_map(known) if callable(weight_map) else weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def unended(folder: Path) -> None:
    edit(folder, eos_token_id="removed")
    edit(folder, "tokenizer_config.json", eos_token="removed")
    (folder / "generation_config.json").unlink()


def large_embedding(folder: Path) -> None:
    weights(folder, lambda t: t.update({"model.embed_tokens.weight": torch.randn(9000, 32)}))
    edit(folder, vocab_size=9000)


END = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}%s{% endfor %}"
END += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
HEAD, NORM, GATE = "lm_head.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight"

# (family, how, words of the refusal)
CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    # Names and shapes.
    "one tensor is missing": ("llama", without(UP), f"lack {UP}"),
    "the last layer is missing": ("llama", without("layers.1."), r"lack model.layers.1.* and 6 more"),
    "no head, and none is tied": ("llama", config(tie_word_embeddings=False), "lack lm_head.weight"),
    "a tensor of no layer": ("llama", tensors(lambda t: t.update({"model.mix.weight": t[UP] + 1})), "have model.mix"),
    "biases that the config does not have": ("qwen2", config(model_type="llama"), "have .*bias"),
    "biases that the weights do not have": ("llama", config(attention_bias=True), "lack .*_proj.bias"),
    "a tied head that differs": (
        "llama",
        tensors(lambda t: t.update({HEAD: t["model.embed_tokens.weight"] + 0.1})),
        "ties lm_head.weight .* two different",
    ),
    "more layers in the config": ("llama", config(num_hidden_layers=3), "lack model.layers.2"),
    "fewer layers in the config": ("llama", config(num_hidden_layers=1), "have model.layers.1"),
    "another vocabulary in the config": ("llama", config(vocab_size=300), r"embed_tokens.* config.json requires"),
    "a transposed matrix": ("llama", changed(UP, lambda w: w.t()), r"is \[32, 48\], but config.json requires"),
    "an adapter alone": ("llama", tensors(lambda t: renamed(t, "model.", "base_model.model.model.")), "lack lm_head"),
    "the config of another family": ("llama", config(model_type="qwen2"), "lack .*bias"),
    "one bias of six": ("qwen2", without("layers.1.self_attn.v_proj.bias"), "lack .*v_proj.bias"),
    "a router is missing": ("mixtral", without("layers.1.block_sparse_moe.gate"), "lack .*gate"),
    "a part of an expert is missing": ("mixtral", without("experts.2.w1"), "can't be combined"),
    "a whole expert is missing": ("qwen3_moe", without("layers.1.mlp.experts.2."), "experts"),
    "more experts for a token than there are": ("qwen3_moe", config(num_experts_per_tok=9), "of 4 experts"),
    "a fused matrix is missing": ("phi3", without("layers.1.mlp.gate_up_proj"), "lack .*gate_up_proj"),
    "fewer positions in the weights": ("gpt2", changed("wpe.weight", lambda w: w[:32]), r"wpe.weight is \[32, 32\]"),
    # Values.
    "NaN": ("llama", changed(UP, lambda w: w.clone().index_fill(0, torch.tensor([3]), torch.nan)), "NaN or infinity"),
    "a tensor of zeros": ("llama", changed(UP, torch.zeros_like), "all zeros"),
    "half of a matrix is zeros": ("llama", tensors(lambda t: t[UP][24:].zero_()), "ends with zeros"),
    "one value": ("llama", changed(UP, lambda w: torch.full_like(w, 0.5)), "the same value everywhere"),
    "int8 numbers": ("llama", changed(UP, lambda w: (w * 99).to(torch.int8)), "stored as I8"),
    # Files.
    "a file that is cut": ("llama", lambda f: bytes_of(f, lambda c: c[:-500]), "is damaged"),
    "a shard lacks a tensor that the index names": ("llama", forget_in_shard, f"lack {UP}"),
    "the index lacks a shard": ("llama", forget_shard, "lack"),
    "an index to nowhere": ("llama", indexed({"a": 3}), "weight_map"),
    "a shard in another folder": ("llama", indexed({"a": "../elsewhere.safetensors"}), "outside the folder"),
    "the same file for each shard": ("llama", indexed(lambda known: dict.fromkeys(known, min(known.values()))), "lack"),
    "no weights": ("llama", lambda f: (f / "model.safetensors").unlink(), r"no \*.safetensors"),
    # The config.
    "no config": ("llama", lambda f: (f / "config.json").unlink(), "config.json: No such file"),
    "two thousand million layers": ("llama", config(num_hidden_layers=2 * 10**9), "at most 4096"),
    "no layers": (
        "llama",
        lambda f: edit(f, num_hidden_layers=0) or weights(f, lambda t: pop(t, "layers.")),
        f"without layers|{UNBUILDABLE}",
    ),
    "heads that do not divide": ("llama", config(num_attention_heads=3), "config.json"),
    "a rotation without a base": (
        "llama",
        config(rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
        "rope_theta",
    ),
    "a new model type": ("llama", config(model_type="llama9000"), UNBUILDABLE),
    "the code of a stranger": (
        "llama",
        config(model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
        UNBUILDABLE,
    ),
    "quantized by its word": ("llama", config(quantization_config={"quant_method": "awq"}), "config.json|lack"),
    "a vision part in a text model": ("llama", config(vision_config={"hidden_size": 8}), "takes images besides text"),
    "not causal by a flag": ("llama", config(is_causal=False), "not causal"),
    "the config is a list": ("llama", lambda f: (f / "config.json").write_text("[1]"), "not a JSON object"),
    # Tokenizer and template.
    "no template": ("llama", lambda f: (f / "chat_template.jinja").unlink(), "no chat template"),
    "a tokenizer with more tokens": ("llama", lambda f: tokenizer(f, grow), "its embedding has only"),
    "a tokenizer of a small model": ("llama", large_embedding, "its tokenizer has only"),
    "an end token outside": ("llama", config(eos_token_id=70_000), "end token has the id 70000"),
    "an end token in words": ("llama", config(eos_token_id="two"), "eos_token_id is 'two'"),
    "no end token at all": ("llama", unended, "end token"),
    "a tokenizer that is none": ("llama", lambda f: (f / "tokenizer.json").write_text('{"a": 3}'), "not a tokenizer"),
    "a template that ends with no token": ("llama", lambda f: template(f, END.replace("%s", "")), "can't"),
    "a template that ends with another token": (
        "llama",
        lambda f: template(f, END.replace("%s", "{{ '<|im_start|>' }}")),
        "ends an answer with '<|im_start|>'",
    ),
    "a template that calls itself": (
        "llama",
        lambda f: template(f, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        "template",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_folder_is_refused(case: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    kind, change, words = CASES[case]
    folder = Path(shutil.copytree(whole(kind), tmp_path / "model"))
    change(folder)
    with pytest.raises(UsageError, match=words) as caught:
        prepare_and_load(folder, tmp_path / "prepared")
    assert ".tmp" not in caught.value.message, "the folder that is named is the owner's, not our copy"


@pytest.mark.parametrize("kind", [name for name in FAMILIES if name not in GOOD])
def test_a_model_of_another_kind(kind: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=FAMILIES[kind][3]):
        prepare_and_load(whole(kind), tmp_path / "prepared")


@pytest.mark.parametrize("kind", GOOD)
def test_whole_folders_are_taken(kind: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = prepare_and_load(whole(kind), tmp_path / "prepared").adapter
    assert adapter and len(adapter) % 4 == 0, "A and B of each module of both layers"


def prepare_and_load(source: Path, target: Path) -> LoraModel:
    prepare_model(str(source), target)
    return load_any(target)


def test_what_is_legal(tiny_source: Path, tmp_path: Path) -> None:
    """A padded vocabulary, a tied head that is stored twice, old buffers, a reward head, a token without a row."""
    folder = Path(shutil.copytree(tiny_source, tmp_path / "model"))

    def add(tensors: Tensors) -> None:
        rows = len(tensors["model.embed_tokens.weight"])
        tensors["model.embed_tokens.weight"] = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(30, 32)])
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["v_head.summary.weight"] = torch.randn(1, 32)
        edit(folder, vocab_size=rows + 30)

    weights(folder, add)
    image = {"id": 90_000, "content": "<image>", "special": True, "normalized": False}
    image |= {"lstrip": False, "rstrip": False, "single_word": False}
    tokenizer(folder, lambda content: content["added_tokens"].append(image))
    assert prepare_model(str(folder), tmp_path / "prepared")["eos_ids"]
