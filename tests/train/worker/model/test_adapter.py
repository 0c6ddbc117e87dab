"""The adapter's files are PEFT's: they load there and give the same logits; the merged folder gives them too."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from train.worker.model.test_general import write_other
from train.worker.models import load_any, load_slow, write_model
from transformers import AutoModelForCausalLM

from hivetune.base.disk import write_json
from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.models.architecture import read_architecture
from hivetune.models.prepared import DESCRIPTION
from hivetune.process.child import Heartbeat
from hivetune.release.worker.merge import merge
from hivetune.run.choices import Choices
from hivetune.train.worker.model.adapter import begin, fill, initialise, read_adapter, write_adapter

TOKENS = torch.tensor([[1, 5, 9, 33, 12, 60, 7, 8]])
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "some modules": {"target_modules": ["q_proj", "down_proj"]},
    "one layer": {"target_modules": ["layers.1.self_attn.q_proj"]},
    "a pattern": {"target_modules": r".*_proj"},
    "a pattern of layers": {"target_modules": r"model\.layers\.[12]\..*\.[qv]_proj"},
}


@torch.no_grad()
def logits(module: Any) -> torch.Tensor:
    return module(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize(("kind", "variant"), [*(("llama", v) for v in VARIANTS), ("gpt2", "plain")])
def test_peft_loads_the_adapter_and_gives_the_same_logits(kind: str, variant: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base") if kind == "llama" else write_other(tmp_path / "base", "gpt2")
    lora = LoraConfig(r=4, alpha=12, **VARIANTS[variant])
    ours = load_slow(base, torch.float32, lora)
    write_adapter(tmp_path / "adapter", ours.adapter, lora, str(base), None)
    wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    trained = [name for name, _ in wrapped.named_parameters() if "lora_" in name]
    assert len(trained) == len(ours.adapter)
    # The same sums in the same order but for the place of the scale: a few roundings of fp32.
    assert torch.allclose(logits(wrapped), logits(ours.module), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(wrapped), logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_paths_and_the_plan_adapt_the_same_modules(variant: str, tmp_path: Path) -> None:
    base, lora = write_model(tmp_path), LoraConfig(r=4, **VARIANTS[variant])
    fast, general = (load_any(base, lora=lora, choices=Choices(path=path)) for path in ("fast", "general"))
    assert fast.path == "fast" and general.path == "general"
    assert fast.adapter.keys() == general.adapter.keys()
    assert read_architecture(base).adapter_parameters(4, lora.target_modules) == fast.master_N.numel()


def test_what_peft_wrote_is_read(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    wrapped.save_pretrained(tmp_path / "theirs")
    lora, tensors = read_adapter(tmp_path / "theirs")
    ours = load_slow(base, torch.float32, lora)
    fill(ours.adapter, tensors, "theirs")
    assert torch.allclose(logits(wrapped), logits(ours.module), rtol=1e-4, atol=1e-5)


REFUSED: dict[str, dict[str, Any]] = {
    "peft_type LOHA": {"peft_type": "LOHA"},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias all": {"bias": "all"},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1, 2]},
    "lora_alpha is None": {"lora_alpha": None},
    **{
        f"init_lora_weights {way}": {"init_lora_weights": way}
        for way in ("pissa", "pissa_niter_4", "olora", "corda", "loftq")
    },
}


def test_what_cannot_be_applied_is_refused(tmp_path: Path) -> None:
    """Read as plain LoRA such an adapter began at a first loss of 16.5 instead of 3.5."""
    lora, folder = LoraConfig(r=4), tmp_path / "a"
    adapter = load_slow(write_model(tmp_path / "base"), torch.float32, lora).adapter
    write_adapter(folder, adapter, lora, "base", None)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for reason, change in REFUSED.items():
        path.write_text(json.dumps(config | change))
        with pytest.raises(UsageError, match=f"unsupported adapter: .*{reason}"):
            read_adapter(folder)
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "lora_alpha"}))
    with pytest.raises(UsageError, match="lora_alpha is None"):
        read_adapter(folder)
    next(iter(adapter.values()))[0, 0] = torch.nan
    write_adapter(folder, adapter, lora, "base", None)
    with pytest.raises(UsageError, match=r"q_proj\.lora_A\.weight is not finite"):
        read_adapter(folder)


def test_an_adapter_to_start_from_has_the_run_s_base_and_scale(tmp_path: Path) -> None:
    base, lora = write_model(tmp_path / "base"), LoraConfig(r=4, alpha=8)
    adapter = load_slow(base, torch.float32, lora).adapter
    write_json(base / DESCRIPTION, {"kind": "hub", "source": "org/base"})
    for named, alpha, reason in (("org/another", 8, "was trained on"), ("org/base", 4, "is scaled by")):
        folder = tmp_path / str(alpha)
        write_adapter(folder, adapter, lora.model_copy(update={"alpha": alpha}), named, None)
        with pytest.raises(UsageError, match=reason):
            begin(adapter, lora.model_copy(update={"start": str(folder)}), 0, base)


def test_first_values_depend_on_name_and_seed_only(tmp_path: Path) -> None:
    base = write_model(tmp_path)
    found = {}
    for path in ("fast", "general"):
        model = load_any(base, choices=Choices(path=path))
        initialise(model.adapter, 5)
        found[path] = {name: view.clone() for name, view in model.adapter.items()}
    assert found["fast"].keys() == found["general"].keys()
    assert all(torch.equal(found["fast"][name], found["general"][name]) for name in found["fast"])
    few = load_slow(base, torch.float32, LoraConfig(r=4, target_modules=["up_proj"]))
    initialise(few.adapter, 5)
    assert all(torch.equal(view, found["fast"][name]) for name, view in few.adapter.items())
    assert all(bool(view.any()) == (".lora_A." in name) for name, view in few.adapter.items())
    initialise(few.adapter, 6)
    assert not any(torch.equal(v, found["fast"][n]) for n, v in few.adapter.items() if "lora_A" in n)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merged_is_base_plus_adapter(kind: str, shards: int, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base") if kind == "llama" else write_other(tmp_path / "base", "gpt2")
    if shards > 1:
        module = AutoModelForCausalLM.from_pretrained(base)
        (base / "model.safetensors").unlink()
        module.save_pretrained(base, max_shard_size="60KB")
    lora = LoraConfig(r=4, alpha=12)
    ours = load_slow(base, torch.float32, lora)
    write_adapter(tmp_path / "adapter", ours.adapter, lora, str(base), None)
    assert merge(base, tmp_path / "adapter", tmp_path / "merged", Heartbeat(None)) == "source"
    assert (len(list((tmp_path / "merged").glob("*.safetensors"))) > 1) == (shards > 1)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), logits(ours.module), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("change", "dtype"), [(1.0, "source"), (1e-3, "float32")])
def test_a_merge_rounds_each_weight_once_unless_that_would_swallow_the_adapter(
    change: float, dtype: str, tmp_path: Path
) -> None:
    """The steps of bfloat16 are 1/256 of a weight."""
    base, lora = write_model(tmp_path / "base"), LoraConfig(r=4, alpha=12)
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    module.save_pretrained(base)
    ours = load_slow(base, torch.float32, lora)
    for name, view in ours.adapter.items():
        view.mul_(change if ".lora_B." in name else 1.0)
    write_adapter(tmp_path / "adapter", ours.adapter, lora, str(base), None)
    assert merge(base, tmp_path / "adapter", tmp_path / "merged", Heartbeat(None)) == dtype
    merge(base, tmp_path / "adapter", tmp_path / "exact", Heartbeat(None), exact=True)
    merged, exact = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "exact"))
    written = torch.float32 if dtype == "float32" else torch.bfloat16
    assert all(torch.equal(merged[name], tensor.to(written)) for name, tensor in exact.items())
    known = json.loads((base / "config.json").read_text())["dtype"]
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == ("float32" if change < 1 else known)


def test_an_adapter_of_another_model_leaves_no_folder(tmp_path: Path) -> None:
    base, other = write_model(tmp_path / "base"), write_model(tmp_path / "other", num_hidden_layers=4)
    lora = LoraConfig(r=4)
    write_adapter(tmp_path / "adapter", load_slow(other, torch.float32, lora).adapter, lora, str(other), None)
    with pytest.raises(UsageError, match="do not have under this name"):
        merge(base, tmp_path / "adapter", tmp_path / "merged", Heartbeat(None))
    assert not (tmp_path / "merged").exists()
