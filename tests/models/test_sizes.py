"""Every model can be planned when it is prepared: the modules of those without a formula are counted then."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import load_any
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.config import RunConfig, parse_config
from hivetune.errors import UsageError
from hivetune.models.architecture import read_architecture
from hivetune.models.prepared import folder_for
from hivetune.models.worker.prepare_model import prepare_model
from hivetune.train.plan.choose import step_flops
from hivetune.train.plan.memory import predict_peak, setup_of
from hivetune.train.plan.run import plan_run

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "opt": {
        "hidden_size": 48,
        "ffn_dim": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 48,
    },
    "mamba": {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 8},
    "mixtral": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_local_experts": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
}


def write_kind(source: Path, folder: Path, kind: str) -> Path:
    shutil.copytree(source, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    known = json.loads((folder / "config.json").read_text())
    ids = {name: known[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **ids, **KINDS[kind])).save_pretrained(folder)
    return folder


def config_of(model: Path) -> RunConfig:
    return parse_config({"model": str(model), "data": {"path": "rows.jsonl"}, "lora": {"r": 4}}, "test")


@pytest.mark.parametrize("kind", [k if k == "mixtral" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_model_without_a_formula_is_counted(
    kind: str, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "home"))
    source = write_kind(tiny_source, tmp_path / "model", kind)
    with pytest.raises(UsageError, match=f"the sizes of a {kind} do not follow"):
        plan_run(config_of(source), memory_gb=16, cores=2)
    prepare_model(str(source), folder_for(str(source)))
    found = read_architecture(folder_for(str(source)))
    module = AutoModelForCausalLM.from_pretrained(source)
    assert found.parameters == sum(parameter.numel() for parameter in module.parameters())
    loaded = load_any(folder_for(str(source)))
    assert found.adapter_parameters(4) == loaded.master_N.numel()
    planned = plan_run(config_of(source), memory_gb=16, cores=2, rows=100, tokens=200)
    assert planned.setup.architecture == found and planned.choice is not None and planned.setup.path == loaded.path
    assert planned.setup.adapter_parameters == loaded.master_N.numel()


def test_experts_take_the_memory_of_all_and_the_time_of_those_that_a_token_meets(
    tiny_source: Path, tmp_path: Path
) -> None:
    prepare_model(str(write_kind(tiny_source, tmp_path / "model", "mixtral")), tmp_path / "prepared")
    found = read_architecture(tmp_path / "prepared")
    inside = 3 * 48 * 80  # gate, up and down of one expert
    assert found.linear_parameters == 2 * (2 * inside + 2 * 48 * 48 + 2 * 48 * 24)
    assert found.parameters > 2 * 8 * inside
    setup = replace(setup_of(found, 4, "all-linear", "float32"), path="general")
    attention = 2 * 4 * (2 * (48 + 48) + 2 * (48 + 24))
    assert setup.adapter_parameters == attention, "experts stay frozen"
    assert predict_peak(setup, 64).parts["weights"] == 4 * found.parameters
    assert step_flops(setup, [(64, 0)]) == pytest.approx(
        64 * (4 * found.linear_parameters + 6 * attention) + 3.5 * 2 * 2 * 48 * 64 * 64
    )
