"""Short float32 runs that must come to what they came to before: losses, gradient norms, and the adapter's hash.

Bits hold for one processor model and one torch. Elsewhere the figures are compared within bounds, and the test reports
that it could compare no hash. To accept a wanted change, or to add the hashes of another processor, run this file with
HIVETUNE_WRITE_GOLDEN=1.
"""

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import EXPERTS, describe, write_model
from train.worker.runs import learnable_rows, make_run, metrics, run_training
from transformers import AutoModelForCausalLM

from hivetune.base.disk import sha256_file, write_json
from hivetune.models.worker.linears import count_sizes

GOLDEN = Path(__file__).parent / "golden" / "runs.json"
# Sums in other orders differ in the seventh digit; a dozen steps of AdamW at a rate of 1e-2 let that grow.
LOSS_BOUND, NORM_BOUND = 2e-3, 2e-2


def processor() -> str:
    """The processor model and the torch that computed: what the bits of a run depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if platform.system() == "Linux" else []
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {name.strip(): value.strip() for name, value in facts.items()}
    flags = told.get("flags", "").split()
    widest = next((name for name in ("amx_bf16", "avx512f", "avx2") if name in flags), "")
    names = ("vendor_id", "cpu family", "model")
    return " ".join((*(told.get(name, "?") for name in names), widest, f"torch {torch.__version__}"))


def came_and_golden(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the run in `folder` came to, and its golden figures: `losses` and `norms` by step, and the `adapter`'s hash.

    Where no hash of this processor is kept, the golden one is the run's own, and that is printed.
    """
    steps = [entry for entry in metrics(folder) if entry["event"] == "step"]
    losses, norms = ([step[key] for step in steps] for key in ("loss", "grad_norm"))
    digest = sha256_file(folder / "run/adapter_model.safetensors")
    known = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    if os.environ.get("HIVETUNE_WRITE_GOLDEN") == "1":
        hashes = {**known.get(name, {}).get("adapter", {}), processor(): digest}
        rounded = {"losses": [round(loss, 6) for loss in losses], "norms": [float(f"{norm:.5g}") for norm in norms]}
        known[name] = {**rounded, "adapter": hashes}
        write_json(GOLDEN, known)
    golden = known[name]
    if processor() not in golden["adapter"]:
        print(f"{name}: no hash of {processor()} is kept; figures only were compared")
    return (
        {"losses": losses, "norms": norms, "adapter": digest},
        {**golden, "adapter": golden["adapter"].get(processor(), digest)},
    )


def model_of(folder: Path, family: str = "llama", **changes: int) -> Path:
    write_model(folder, family, **changes)
    return describe(folder, count_sizes(AutoModelForCausalLM.from_pretrained(folder)) if family in EXPERTS else None)


def prefixed_rows() -> list[tuple[list[int], list[int]]]:
    """Rows of four conversations that begin alike, as a system prompt makes them."""
    prefixes = [[3 + (number * 7 + place) % 80 for place in range(24)] for number in range(4)]
    return [
        (prefixes[number % 4] + tokens, [0] * 24 + trained)
        for number, (tokens, trained) in enumerate(learnable_rows(40))
    ]


CASES: dict[str, tuple[str, dict[str, Any], Callable[[], list[tuple[list[int], list[int]]]]]] = {
    "plain": ("llama", {}, lambda: learnable_rows(40)),
    "shared prefixes": ("llama", {}, prefixed_rows),
    "dropout": ("llama", {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}, lambda: learnable_rows(40)),
    "rank 64": ("llama", {"lora": {"r": 64, "alpha": 64}}, lambda: learnable_rows(40)),
    "mixture of experts": ("qwen3-moe", {}, lambda: learnable_rows(40)),
    "streamed layers": ("llama", {"choices": {"streamed": 3, "kernels": "torch"}}, lambda: learnable_rows(40)),
    "general path": ("gemma2", {"choices": {"path": "general"}}, lambda: learnable_rows(40)),
    "one worker": ("llama", {"workers": 1, "choices": {"pack_tokens": 32}}, lambda: learnable_rows(40)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_comes_to_what_it_came_to(name: str, tmp_path: Path) -> None:
    family, settings, rows = CASES[name]
    model = model_of(tmp_path / "model", family)
    make_run(tmp_path, rows(), epochs=3, **settings)
    run_training(tmp_path, model)
    came, golden = came_and_golden(name, tmp_path)
    assert came["losses"] == pytest.approx(golden["losses"], rel=LOSS_BOUND)
    assert came["norms"] == pytest.approx(golden["norms"], rel=NORM_BOUND)
    assert came["adapter"] == golden["adapter"]


def test_nf4(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = model_of(tmp_path / "model", hidden_size=64, intermediate_size=128)
    make_run(tmp_path, learnable_rows(40), epochs=3, method="qlora")
    run_training(tmp_path, model)
    came, golden = came_and_golden("nf4", tmp_path)
    assert came["losses"] == pytest.approx(golden["losses"], rel=LOSS_BOUND)
    assert came["norms"] == pytest.approx(golden["norms"], rel=NORM_BOUND)
    assert came["adapter"] == golden["adapter"]
