"""The environments of the peers: one virtual environment for each set of pinned versions, made on first use."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hivetune.process.launch import ENVIRONMENT

# torch first and of the very version that is measured here, so that no resolver brings another build with CUDA.
TRL = ("trl==1.16.0", "peft==0.21.2", "transformers==5.23.0")


@dataclass(frozen=True)
class Row:
    """One line of the results. `packages`: empty for our own environment."""

    name: str
    worker: str
    options: dict[str, Any]
    packages: tuple[str, ...] = ()
    sets: tuple[str, ...] = ("short", "agents", "long", "prefix")
    about: str = ""
    asked_for: bool = False
    """Only when named by --rows, or by --full-precision."""
    own_curve: bool = False
    """Other adapters than the rest: its losses are not held against the reference."""


NO_RECOMPUTE = {"gradient_checkpointing": False}
FLOAT32_ROWS = ("hivetune fp32", "TRL best effort fp32")
ROWS = (
    Row("hivetune", "ours.py", {"choices": {}}, about="defaults"),
    Row(
        "hivetune fp32",
        "ours.py",
        {"choices": {}, "dtype": "float32"},
        about="dtype: float32; the reference of the loss curves",
    ),
    Row(
        "plain torch",
        "ours.py",
        {"choices": {"kernels": "torch", "products": "torch"}},
        about="the functions of rows by torch, where a card has torch.compile and a processor C++",
        asked_for=True,
    ),
    Row(
        "eager attention",
        "ours.py",
        {"choices": {"attention": "eager"}},
        about="two products and a softmax instead of a fused attention",
        asked_for=True,
    ),
    Row(
        "rank 64",
        "ours.py",
        {"choices": {}, "lora": {"r": 64, "alpha": 128}},
        sets=("short", "agents"),
        about="lora.r: 64 with the same scale, adapters of its own",
        asked_for=True,
        own_curve=True,
    ),
    Row(
        "TRL defaults",
        "theirs.py",
        {"trainer": "trl", "arguments": {}},
        TRL,
        sets=("short", "agents"),
        about="as SFTConfig comes (float32 weights, bfloat16 autocast, recompute), 2 x 4",
    ),
    Row(
        "TRL best effort",
        "theirs.py",
        {"trainer": "trl", "dtype": "bfloat16", "arguments": {**NO_RECOMPUTE, "bf16": True}},
        TRL,
        about="bfloat16 weights, no recompute, 2 x 4",
    ),
    Row(
        "TRL best effort fp32",
        "theirs.py",
        {"trainer": "trl", "dtype": "float32", "arguments": {**NO_RECOMPUTE, "bf16": False}},
        TRL,
        about="float32 throughout, no recompute, 2 x 4: a processor without bfloat16",
        asked_for=True,
    ),
    Row(
        "transformers + PEFT",
        "theirs.py",
        {"trainer": "transformers", "dtype": "bfloat16", "arguments": {**NO_RECOMPUTE, "bf16": True}},
        TRL,
        sets=("short", "agents"),
        about="Trainer, bfloat16 weights, no recompute, 2 x 4",
    ),
    Row(
        "transformers + PEFT fp32",
        "theirs.py",
        {"trainer": "transformers", "arguments": NO_RECOMPUTE},
        TRL,
        sets=("agents",),
        about="Trainer, float32 throughout: tells whether our own reference is right",
        asked_for=True,
    ),
)


def python_of(row: Row, cache: Path) -> Path:
    """The interpreter that the row runs in; its environment is made below `cache` when it is not there.

    Raises subprocess.CalledProcessError when a package can't be installed.
    """
    if not row.packages:
        return Path(sys.executable)
    torch = "torch==" + metadata.version("torch").partition("+")[0]  # without the name of its build
    name = hashlib.sha256("\n".join((torch, *row.packages, sys.version)).encode()).hexdigest()[:12]
    folder, ready = cache / f"peer-{name}", cache / f"peer-{name}" / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, torch], check=True, stderr=subprocess.DEVNULL)
        subprocess.run([*pip, *row.packages], check=True, stderr=subprocess.DEVNULL)
        ready.touch()
    return folder / "bin" / "python"


def environment(row: Row, device: str = "cpu") -> dict[str, str]:
    """Every core and no network for all. How threads wait is each one's own: torch's default, or what our runs set."""
    waiting = {name: ENVIRONMENT[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    inherited = {name: value for name, value in os.environ.items() if name not in waiting}
    return {
        **inherited,
        **(waiting if row.worker == "ours.py" else {}),
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
    }
