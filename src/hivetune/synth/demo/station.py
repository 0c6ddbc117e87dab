"""What the demo trains on and asks: its rows and config, and three held-out prompts at the end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hivetune.base.disk import write_atomic
from hivetune.llama.backend import Backend
from hivetune.synth.demo.rows import SYSTEM_PROMPTS, write_demo_data
from hivetune.train.open import Run

NUM_PROMPTS = 3


def write_inputs(folder: Path) -> Path:
    """Rows and config below `folder`, where they are not there yet; returns the config's path."""
    data = folder / "interactions.jsonl"
    if not data.exists():
        write_demo_data(data)
    tree: dict[str, Any] = {
        "model": "smollm2-135m",
        "data": {"path": str(data), "system_prompts": SYSTEM_PROMPTS},
        "lora": {"r": 8, "alpha": 16},
        "batch_size": 8,
        "max_steps": 120,
        "learning_rate": 5e-4,
        "validate_every": 30,
        "output": str(folder / "run"),
        # 12 are answered one at a time, the other 52 in a third of their time; the 48 general questions would add 70 s.
        "eval": {"latency_prompts": 12, "general": False},
        "gate": {"success_gain": 0.0},
    }
    path = folder / "demo.yaml"
    if not path.exists():
        write_atomic(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100).encode())
    return path


def ask_some(run: Run, evaluation: Mapping[str, Any], backend: Backend) -> list[dict[str, str]]:
    """The same held-out prompts answered by the base (in the evaluation) and by the exported file."""
    chosen = evaluation["answers"][:: max(1, len(evaluation["answers"]) // NUM_PROMPTS)][:NUM_PROMPTS]
    found = []
    for row in chosen:
        messages = [
            {"role": message.role, "content": message.content}
            for message in run.snapshot.info(row["row"]).messages
            if message.role != "assistant"
        ]
        answer = backend.complete(messages, max_tokens=run.config.eval.new_tokens)
        found.append({"prompt": row["prompt"], "base": row["base"]["answer"], "tuned": answer.text})
    return found
