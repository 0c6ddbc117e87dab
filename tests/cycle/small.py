"""A home with a tiny real model, rows that it can learn, and the loop as a process of its own."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from serve.hive import MODEL, make_home

NAME = "demo"
WORDS = ("red", "blue", "green", "black", "white", "small", "large", "quick", "slow", "old", "new", "warm")


def make_rows(first: int, count: int, *, seed: int = 7) -> list[dict[str, Any]]:
    """Questions with one kind of answer, each of another session; `first` is the number of the first one."""
    rows = []
    for number in range(first, first + count):
        said = random.Random(seed * 100_003 + number)
        words = [said.choice(WORDS) for _ in range(4)]
        text = f"What comes after {' '.join(words)}? It is question {number}."
        answer = (
            f"After {words[-1]} comes {WORDS[(WORDS.index(words[-1]) + 1) % len(WORDS)]}, and {words[0]} was first."
        )
        rows.append(
            {
                "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}],
                "session_id": f"s{number}",
                "user_id": f"u{number % 17}",
            }
        )
    return rows


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def make_config(folder: Path, **cycle: Any) -> Path:
    """`folder/cycle.yaml` and an empty `folder/rows.jsonl`; the model lies in `$HIVETUNE_HOME`."""
    make_home()
    (folder / "rows.jsonl").touch()
    settings = {
        "model": MODEL,
        "data": {"path": str(folder / "rows.jsonl"), "near_duplicates": 0},
        "lora": {"r": 4},
        "max_length": 256,
        "batch_size": 8,
        "epochs": 2,
        "learning_rate": 0.01,
        "dtype": "float32",
        "device": "cpu",
        "eval": {"prompts": 2, "new_tokens": 4, "slots": 2, "latency_prompts": 1},
        "gate": {"latency_ratio": None, "memory_ratio": None},
        "cycle": {"name": NAME, "after_rows": 40, "watch": {"hours": 0}, **cycle},
    }
    path = folder / "cycle.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def cycle(*arguments: str, check: bool = True, **environment: str) -> dict[str, Any]:
    """`hivetune cycle ARGUMENTS --json`, to its end."""
    command = [sys.executable, "-m", "hivetune", "cycle", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **environment})
    assert not check or done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return {**document, "exit_code": done.returncode, "told": done.stderr}
