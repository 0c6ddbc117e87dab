"""Eighty wrong model folders: damaged, lying, of other kinds. None is ever trained: each is refused in its own words.

The first list is what downloads, disks and conversions do; the second was written by thinking of what no check looks
at. Each must be refused when it is prepared, or, if only running it tells, when it is loaded.
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
    header,
    pop,
    renamed,
    shards,
    template,
    tokenizer,
    weights,
)
from transformers import AutoConfig

from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.models.worker.prepare_model import prepare_model
from hivetune.train.worker.model.load import load_model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
WHISPER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
WHISPER |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("AutoModelForCausalLM", "qwen2", {}),
    "mixtral": ("AutoModelForCausalLM", "mixtral", {"num_local_experts": 4}),
    "phi3": ("AutoModelForCausalLM", "phi3", {}),
    "gpt2": ("AutoModelForCausalLM", "gpt2", {}),
    "bert": ("AutoModelForMaskedLM", "bert", {}),
    "roberta": ("AutoModelForCausalLM", "roberta", {}),
    "bidirectional gemma 3": ("AutoModelForCausalLM", "gemma3_text", {"use_bidirectional_attention": True}),
    "xlnet": ("AutoModelForCausalLM", "xlnet", {"n_head": 4, "d_model": 32, "d_inner": 48, "n_layer": 2}),
    "t5": ("AutoModelForSeq2SeqLM", "t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "bart": ("AutoModelForSeq2SeqLM", "bart", WHISPER),
    "whisper": ("AutoModelForSpeechSeq2Seq", "whisper", WHISPER),
    "classifier": ("AutoModelForSequenceClassification", "llama", {"tie_word_embeddings": True}),
    "vit": ("AutoModelForImageClassification", "vit", {}),
}


@pytest.fixture
def folder(tiny_source: Path, tmp_path: Path) -> Path:
    """A whole Llama with tied embeddings, to be spoiled."""
    return Path(shutil.copytree(tiny_source, tmp_path / "model"))


@pytest.fixture(scope="session")
def other(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of other kinds of models, with the same tokenizer."""

    @cache
    def make(name: str) -> Path:
        made = Path(shutil.copytree(tiny_source, tmp_path_factory.mktemp("other") / "model"))
        (made / "generation_config.json").unlink(missing_ok=True)
        known = json.loads((made / "config.json").read_text())
        class_name, kind, extra = OTHERS[name]
        ids = {"vocab_size": known["vocab_size"], "eos_token_id": known["eos_token_id"], "bos_token_id": None}
        torch.manual_seed(5)
        config = AutoConfig.for_model(kind, **{**SIZES, **ids, **extra})
        if kind == "vit":
            config.image_size, config.patch_size = 16, 8
        getattr(transformers, class_name).from_config(config).save_pretrained(made)
        return made

    return make


END = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}%s{% endfor %}"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

# What happens to folders: (how, words of the refusal).
HAPPENS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one tensor is missing": (lambda f: weights(f, lambda t: t.pop(UP)), f"lack {UP}"),
    "the last layer is missing": (
        lambda f: weights(f, lambda t: pop(t, "layers.1.")),
        r"lack model.layers.1.* and 6 more",
    ),
    "the embedding is missing": (lambda f: weights(f, lambda t: t.pop("model.embed_tokens.weight")), "lack"),
    "the last norm is missing": (lambda f: weights(f, lambda t: t.pop("model.norm.weight")), "lack model.norm"),
    "no head, and none is tied": (lambda f: edit(f, tie_word_embeddings=False), "lack lm_head.weight"),
    "a layer too many": (
        lambda f: weights(f, lambda t: t.update({n.replace("s.1", "s.2"): v + 1 for n, v in t.items() if "s.1." in n})),
        "hold model.layers.2",
    ),
    "a tensor of no layer": (
        lambda f: weights(f, lambda t: t.update({"model.mix.weight": t[UP] + 1})),
        "hold model.mix",
    ),
    "biases that the config does not have": (
        lambda f: weights(f, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
        "hold .*q_proj.bias",
    ),
    "biases that the weights do not have": (lambda f: edit(f, attention_bias=True), "lack .*_proj.bias"),
    "a tied head that differs": (
        lambda f: weights(f, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0.1})),
        "ties lm_head.weight .* two different",
    ),
    "more layers in the config": (lambda f: edit(f, num_hidden_layers=3), "lack model.layers.2"),
    "fewer layers in the config": (lambda f: edit(f, num_hidden_layers=1), "hold model.layers.1"),
    "two thousand million layers": (lambda f: edit(f, num_hidden_layers=2 * 10**9), "at most 4096"),
    "a larger vocabulary in the config": (lambda f: edit(f, vocab_size=4000), r"embed_tokens.weight is .* by config"),
    "a smaller vocabulary in the config": (lambda f: edit(f, vocab_size=300), r"embed_tokens.weight is .* by config"),
    "another width": (lambda f: edit(f, hidden_size=64), "by config.json it is"),
    "another width of the MLP": (lambda f: edit(f, intermediate_size=64), r"by config.json it is \[32, 64\]"),
    "other key heads": (lambda f: edit(f, num_key_value_heads=4), "by config.json it is"),
    "another size of a head": (lambda f: edit(f, head_dim=16), "by config.json it is"),
    "a transposed matrix": (lambda f: weights(f, lambda t: t.update({UP: t[UP].t()})), r"is \[32, 48\], by config"),
    "NaN": (lambda f: weights(f, lambda t: t[UP][-1].fill_(torch.nan)), "NaN or infinity"),
    "infinity in a norm": (lambda f: weights(f, lambda t: t["model.norm.weight"].fill_(torch.inf)), "NaN or infinity"),
    "a tensor of zeros": (lambda f: weights(f, lambda t: t[UP].zero_()), "all zeros"),
    "a file that is cut": (lambda f: bytes_of(f, lambda c: c[:-500]), "outside of the file"),
    "a file whose end is zeros": (lambda f: bytes_of(f, lambda c: c[:-3000] + bytearray(3000)), "zeros"),
    "a shard lacks a tensor that the index names": (forget_in_shard, f"lack {UP}"),
    "the index lacks a shard": (forget_shard, "lack"),
    "a tokenizer with more tokens": (lambda f: tokenizer(f, grow), "its embedding only"),
    "a tokenizer of a small model": (
        lambda f: (
            weights(f, lambda t: t.update({"model.embed_tokens.weight": torch.randn(9000, 32)}))
            or edit(f, vocab_size=9000)
        ),
        "its tokenizer only",
    ),
    "an end token outside": (lambda f: edit(f, eos_token_id=70_000), "end token 70000 is outside"),
    "a template that ends with no token": (
        lambda f: template(f, END.replace("%s", "") + GENERATION),
        "can't write a question|can't render",
    ),
    "a template that ends with another token": (
        lambda f: template(f, END.replace("%s", "{{ '<|im_start|>' }}") + GENERATION),
        "ends an answer with '<|im_start|>'",
    ),
    "no such activation": (lambda f: edit(f, hidden_act="sinus"), "transformers can't build a model from config.json"),
    "no such rotation": (
        lambda f: edit(f, rope_parameters={"rope_type": "odd", "rope_theta": 1e4}),
        "transformers can't build a model from config.json",
    ),
    "heads that do not divide": (lambda f: edit(f, num_attention_heads=3), "config.json"),
    "a width of text": (
        lambda f: edit(f, hidden_size="thirty-two"),
        "transformers can't build a model from config.json",
    ),
    "no model type": (lambda f: edit(f, model_type="removed"), "transformers can't build a model from config.json"),
    "a new model type": (
        lambda f: edit(f, model_type="llama9000"),
        "transformers can't build a model from config.json",
    ),
    "the config of another family": (lambda f: edit(f, model_type="qwen2"), "lack .*bias"),
    "an adapter alone": (
        lambda f: weights(f, lambda t: renamed(t, "model.", "base_model.model.model.")),
        "lack lm_head.weight, model.embed_tokens",
    ),
}

# What an adversary does.
PLANNED: dict[str, tuple[Callable[[Path], object], str]] = {
    "names of a compiled module": (lambda f: weights(f, lambda t: renamed(t, "model.", "_orig_mod.model.")), "lack"),
    "names of a wrapped module": (lambda f: weights(f, lambda t: renamed(t, "model.", "module.model.")), "lack"),
    "PEFT's inner names": (
        lambda f: weights(f, lambda t: renamed(t, "q_proj.", "q_proj.base_layer.")),
        "lack .*q_proj",
    ),
    "two projections under each other's shape": (
        lambda f: weights(f, lambda t: renamed(t, "k_proj", "x_proj")),
        "lack .*k_proj",
    ),
    "int8 numbers": (lambda f: weights(f, lambda t: t.update({UP: (t[UP] * 99).to(torch.int8)})), "stored as I8"),
    "all numbers int32": (
        lambda f: weights(f, lambda t: t.update({n: (v * 99).to(torch.int32) for n, v in t.items()})),
        "stored as I32",
    ),
    "one value": (lambda f: weights(f, lambda t: t[UP].fill_(0.5)), "one value only"),
    "half of a matrix is zeros": (lambda f: weights(f, lambda t: t[UP][24:].zero_()), "ends with zeros"),
    "negative infinity in half precision": (
        lambda f: weights(f, lambda t: t.update({UP: t[UP].half().index_fill(0, torch.tensor([3]), -torch.inf)})),
        "NaN or infinity",
    ),
    "an empty tensor": (lambda f: weights(f, lambda t: t.update({UP: torch.zeros(0, 32)})), r"is \[0, 32\]"),
    "one dimension more": (lambda f: weights(f, lambda t: t.update({UP: t[UP][None]})), r"is \[1, 48, 32\]"),
    "a flat matrix": (lambda f: weights(f, lambda t: t.update({UP: t[UP].flatten()})), r"is \[1536\]"),
    "a norm too long": (lambda f: weights(f, lambda t: t.update({"model.norm.weight": torch.ones(33)})), r"is \[33\]"),
    "a tied head of another shape": (
        lambda f: weights(f, lambda t: t.update({"lm_head.weight": torch.randn(7, 32)})),
        r"is \[7, 32\]",
    ),
    "two tensors in one place": (
        lambda f: header(f, lambda h: h[UP].update(data_offsets=h[UP.replace("up", "gate")]["data_offsets"])),
        "can't be read",
    ),
    "a shape that is not its bytes": (lambda f: header(f, lambda h: h[UP].update(shape=[48, 31])), "damaged header"),
    "a type that is not its bytes": (lambda f: header(f, lambda h: h[UP].update(dtype="F16")), "damaged header"),
    "no layers": (
        lambda f: edit(f, num_hidden_layers=0) or weights(f, lambda t: pop(t, "layers.")),
        "without layers|transformers can't build a model from config.json",
    ),
    "a negative number of layers": (lambda f: edit(f, num_hidden_layers=-2), "hold|config.json"),
    "layers in words": (
        lambda f: edit(f, num_hidden_layers="two"),
        "transformers can't build a model from config.json",
    ),
    "layers by halves": (lambda f: edit(f, num_hidden_layers=1.5), "transformers can't build a model from config.json"),
    "sizes in a hidden part": (
        lambda f: edit(f, text_config={"model_type": "llama", "hidden_size": 16}, hidden_size=48),
        "by config|can't build",
    ),
    "a vision part in a text model": (lambda f: edit(f, vision_config={"hidden_size": 8}), "takes images besides text"),
    "not causal by a flag": (lambda f: edit(f, is_causal=False), "not causal"),
    "quantized by its word": (
        lambda f: edit(f, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32}),
        "config.json|lack",
    ),
    "kinds of layers for another depth": (
        lambda f: edit(f, model_type="qwen2", layer_types=["full_attention"]),
        "config.json|lack",
    ),
    "an encoder-decoder by its word": (lambda f: edit(f, model_type="t5"), "encoder-decoder"),
    "an encoder by its word": (lambda f: edit(f, model_type="bert"), "is an encoder"),
    "the config is a list": (lambda f: (f / "config.json").write_text("[1]"), "not a JSON object"),
    "the config is binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00{"), "not JSON"),
    "an end token in words": (lambda f: edit(f, eos_token_id="two"), "eos_token_id is 'two'"),
    "an end token that is true": (lambda f: edit(f, eos_token_id=True), "eos_token_id is True"),
    "end tokens in a list of lists": (lambda f: edit(f, "generation_config.json", eos_token_id=[[2]]), "eos_token_id"),
    "no end token at all": (
        lambda f: (
            edit(f, eos_token_id="removed")
            or edit(f, "tokenizer_config.json", eos_token="removed")
            or (f / "generation_config.json").unlink()
        ),
        "end token",
    ),
    "a tokenizer that is none": (lambda f: (f / "tokenizer.json").write_text('{"model": 3}'), "not a tokenizer"),
    "a control token outside": (
        lambda f: tokenizer(
            f, lambda c: [t.update(id=90_000) for t in c["added_tokens"] if t["content"] == "<\u007cim_start|>"]
        ),
        "number|tokenizer",
    ),
    "a template that calls itself": (
        lambda f: template(f, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        "template",
    ),
    "a template that hides the answer": (
        lambda f: template(f, "Hello{% if add_generation_prompt %}:{% endif %}"),
        "template",
    ),
    "an index to nowhere": (
        lambda f: shards(f) and (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'),
        "weight_map",
    ),
    "the same file for each shard": (
        lambda f: (
            (known := shards(f))
            and (f / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {}, "weight_map": dict.fromkeys(known, min(known.values()))})
            )
        ),
        "lack",
    ),
}

# Of other kinds; those that only running tells are refused when they are loaded.
KINDS = {
    "bert": "is an encoder",
    "roberta": "is an encoder",
    "bidirectional gemma 3": "is not causal",
    "xlnet": "is not causal",
    "t5": "is an encoder-decoder",
    "bart": "is an encoder-decoder",
    "whisper": "is an encoder-decoder",
    "classifier": "hold score.weight",
    "vit": "is not a language model",
}


def prepare_and_load(source: Path, target: Path) -> None:
    prepare_model(str(source), target)
    lora = LoraConfig(r=2)
    load_model(target, lora, method="lora", dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("case", HAPPENS)
def test_a_folder_that_something_happened_to(case: str, folder: Path, tmp_path: Path) -> None:
    change, words = HAPPENS[case]
    change(folder)
    with pytest.raises(Exception, match=words) as caught:
        prepare_model(str(folder), tmp_path / "prepared")
    assert isinstance(caught.value, UsageError) or "template" in str(caught.value)
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize("case", PLANNED)
def test_a_folder_that_was_made_to_deceive(case: str, folder: Path, tmp_path: Path) -> None:
    change, words = PLANNED[case]
    change(folder)
    with pytest.raises(Exception, match=words) as caught:
        prepare_and_load(folder, tmp_path / "prepared")
    assert isinstance(caught.value, UsageError) or "template" in str(caught.value)


@pytest.mark.parametrize("case", KINDS)
def test_a_model_of_another_kind(case: str, other: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=KINDS[case]):
        prepare_and_load(other(case), tmp_path / "prepared")


@pytest.mark.parametrize(
    ("kind", "part", "words"),
    [
        ("qwen2", "layers.0.self_attn.k_proj.bias", "lack .*k_proj.bias"),
        ("mixtral", "layers.1.block_sparse_moe.gate", "lack .*gate"),
        ("mixtral", "experts.2.w2", r"experts.down_proj is \[3"),
        ("mixtral", "experts.2.w1", "can't be combined"),
        ("phi3", "layers.1.mlp.gate_up_proj", "lack .*gate_up_proj"),
        ("gpt2", "h.1.attn.c_proj.weight", "lack .*c_proj"),
    ],
)
def test_a_tensor_that_only_its_family_has(
    kind: str, part: str, words: str, other: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(other(kind), tmp_path / "model"))
    weights(folder, lambda tensors: pop(tensors, part))
    with pytest.raises(UsageError, match=words):
        prepare_model(str(folder), tmp_path / "prepared")


@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "phi3", "gpt2"])
def test_whole_folders_are_taken(kind: str, other: Callable[[str], Path], tmp_path: Path) -> None:
    assert prepare_model(str(other(kind)), tmp_path / "prepared")["eos_ids"]


def test_what_is_legal(folder: Path, tmp_path: Path) -> None:
    """A padded vocabulary, a tied head that is stored twice, old buffers, a reward head, a token without a row."""

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
