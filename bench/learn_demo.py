"""A real case for `hivetune learn`: the base's own failures on the demo's questions, against the documentation.

    python bench/learn_demo.py FOLDER            asks the base, writes FOLDER/rows.jsonl and FOLDER/learn.yaml
    hivetune learn FOLDER/learn.yaml             both stages, and which of them ships

SmolLM2-135M answers a part of the demo's questions; an answer that the row's checker refuses becomes the worse one of a
pair, the docstring is the better one. The other rows are the demo's, as they are.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from hivetune.checkers.find import answer_succeeds
from hivetune.data.render.folder import load_renderer
from hivetune.judge.worker.answers import Completion, answer_prompts, settle_module
from hivetune.models.prepared import find_prepared
from hivetune.records import Message
from hivetune.synth.demo import SYSTEM_PROMPTS, write_demo_data
from hivetune.train.worker.model.general import load_module

NEW_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--asked", type=int, default=120)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    lines = write_demo_data(asked.folder / "demo.jsonl", asked.rows).read_text().splitlines()
    rows = [row for line in lines if (row := whole(line)) is not None]
    chosen = [row for row in rows if "checker" in row][: asked.asked]
    answers = answer([system_and_task(row) for row in chosen])
    worse = {
        row["task"]: text
        for row, (text, ended) in zip(chosen, answers, strict=True)
        if text.strip() and not answer_succeeds(text, row["checker"], ended=ended)
    }
    with open(asked.folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(as_pair(row, worse[row["task"]]) if row["task"] in worse else row) + "\n")
    config = {
        "model": "smollm2-135m",
        "data": {"path": str(asked.folder / "rows.jsonl"), "system_prompts": SYSTEM_PROMPTS, "test": 0.2},
        "learn": {"use": ["sft", "corrections", "pairs", "failures"], "least_bad": 20, "steps": 20},
        "lora": {"r": 8, "alpha": 16},
        "batch_size": 8,
        "max_steps": 40,
        "learning_rate": 5e-4,
        "eval": {"prompts": 64, "new_tokens": NEW_TOKENS},
        "output": str(asked.folder / "out"),
    }
    (asked.folder / "learn.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    print(f"{len(rows)} rows; the base failed on {len(worse)} of {len(chosen)} questions")


def whole(line: str) -> dict[str, Any] | None:
    """The row of a line that is not broken."""
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row if row.get("success") and row.get("output") else None


def system_and_task(row: dict[str, Any]) -> tuple[Message, ...]:
    return Message("system", SYSTEM_PROMPTS[row["agent"]]), Message("user", row["task"])


def as_pair(row: dict[str, Any], worse: str) -> dict[str, Any]:
    kept = {key: row[key] for key in ("agent", "session", "checker") if key in row}
    turns = [{"role": m.role, "content": m.content} for m in system_and_task(row)]
    return {**kept, "prompt": turns, "chosen": row["output"], "rejected": worse}


def answer(prompts: Sequence[tuple[Message, ...]]) -> list[tuple[str, bool]]:
    """Greedy answers of the base, and whether each ended by itself."""
    prepared = find_prepared("smollm2-135m")
    if prepared is None:
        raise SystemExit("smollm2-135m is not prepared: hivetune fetch smollm2-135m")
    renderer = load_renderer(prepared.folder)
    ids = [renderer.prompt(messages) for messages in prompts]
    module = load_module(prepared.folder, dtype=torch.float32, device=torch.device("cpu"))
    found: dict[int, tuple[str, bool]] = {}

    def keep(completion: Completion) -> None:
        found[completion.prompt] = renderer.decode(completion.tokens), completion.ended

    cached = settle_module(module, ids[:2])
    answer_prompts(module, ids, ends=prepared.eos_ids, new_tokens=NEW_TOKENS, slots=16, cached=cached, on_answer=keep)
    return [found[number] for number in range(len(prompts))]


if __name__ == "__main__":
    main()
