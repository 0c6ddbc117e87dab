"""Sizes from config.json: the published totals, what transformers builds, and refusals."""

import json
from pathlib import Path

import pytest
from train.worker import models as engine_models

from hivetune.errors import UsageError
from hivetune.machine.cards import known_model
from hivetune.models.architecture import Architecture, parse_architecture, read_architecture
from hivetune.models.families import FAMILIES

pytestmark = pytest.mark.slow

# Parameter totals as each model's safetensors header on its public page gives them (tied embeddings once).
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "google/gemma-2b-it": 2_506_172_416,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
}


def architecture(name: str) -> Architecture:
    config = known_model(name)
    assert config is not None
    return parse_architecture(config, name)


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_published_totals(name: str, total: int) -> None:
    assert architecture(name).parameters == total


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_that_transformers_builds(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        family,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        **({} if family == "phi3" else {"head_dim": 16}),
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = parse_architecture(json.loads(config.to_json_string(use_diff=False)), family)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {linear.name for linear in found.adapted()} == linears - {"lm_head"}
    norms = {name.removeprefix("model.layers.0.") for name, _ in model.named_modules() if "layers.0." in name}
    assert set(FAMILIES[family].norms.values()) == {name for name in norms if "norm" in name}


def test_each_family_of_the_fast_path_is_compared_with_a_textbook_model() -> None:
    assert {model_type for model_type, _ in engine_models.FAMILIES.values()} == set(FAMILIES)


def test_adapters_are_counted_on_the_modules_that_match() -> None:
    smollm2 = architecture("smollm2-135m")
    assert len(smollm2.adapted()) == len(smollm2.adapted(r".*_proj")) == 30 * 7
    assert smollm2.linear_parameters == 106_168_320 and smollm2.adapter_parameters(16) == 4_884_480
    assert smollm2.adapter_parameters(8, ["q_proj"]) == 30 * 8 * (576 + 576)
    assert smollm2.adapter_parameters(8, r"model\.layers\.[0-4]\..*\.q_proj") == 5 * 8 * (576 + 576)
    with pytest.raises(UsageError, match="query_key_value"):
        smollm2.adapted(["query_key_value"])


def test_a_made_up_number_of_layers_is_refused_before_it_is_counted() -> None:
    config = {**(known_model("smollm2-135m") or {}), "num_hidden_layers": 2_000_000_000}
    with pytest.raises(UsageError, match="at most"):
        parse_architecture(config, "config.json")


def test_the_sizes_of_an_unknown_family_are_not_guessed() -> None:
    config = {**(known_model("smollm2-135m") or {}), "model_type": "brandnew"}
    with pytest.raises(UsageError, match="the sizes of a brandnew") as refused:
        parse_architecture(config, "config.json")
    assert "hivetune fetch" in refused.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"model_type": "bert"}',
        '{"model_type": "qwen3_moe", "num_experts": 128}',
        '{"model_type":"llama","hidden_size":-1,"num_hidden_layers":1,"num_attention_heads":1}',
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="config"):
        read_architecture(tmp_path)


def test_a_missing_config_names_the_command() -> None:
    with pytest.raises(UsageError, match="hivetune fetch") as error:
        read_architecture(Path("/nonexistent/config.json"))
    assert error.value.message == "cannot read /nonexistent/config.json: No such file or directory"
