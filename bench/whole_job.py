"""The whole job as a user meets it: from the command to the finished adapter, ours and TRL's, on the same rows.

Data, loading, steps, validation and the final save are all in it, and beside them what the optimizer steps alone took.
Each round runs everybody once, each in a home and a folder of its own, in an order that changes; the figures are
medians over the rounds with their quartiles, and what compares two is the median of their ratio in the same round.

    python bench/whole_job.py --out whole_job.json                      about 30 minutes on 2 cores
    python bench/whole_job.py --rows 24 --rounds 1 --who hivetune       whether it works
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from step.peers import ROWS, Row, environment, python_of
from step.report import quartiles
from step.rows import prompts_and_answers
from train_step import LORA, MODEL, RATE, prepared_model

from hivetune.base.disk import home
from hivetune.base.journal import read_journal
from hivetune.machine.inventory import describe_machine, read_machine
from hivetune.run.folder import METRICS

OURS = "hivetune"
BATCH_SIZE, VALIDATION = 8, 0.1
KERNELS = "from hivetune.train.worker.model.fast.kernels.build import library; library()"
HERE = Path(__file__).resolve().parent
# What TRL calls its rank and scale.
PEER_LORA = {"r": LORA["r"], "lora_alpha": LORA["alpha"]}


def main() -> None:
    arguments = parse()
    who = arguments.who.split(",")
    peers = {row.name: row for row in ROWS if row.name in who and row.name != OURS}
    pythons = {name: python_of(row, home() / "bench") for name, row in peers.items()}
    model = prepared_model()
    subprocess.run([sys.executable, "-c", KERNELS], check=True)
    names = [*([OURS] if OURS in who else []), *peers]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        write_data(data, arguments.rows)
        for number in range(arguments.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                place = Path(folder) / f"{number}-{name.replace(' ', '-')}"
                place.mkdir()
                if name == OURS:
                    told = ours(place, data, model, arguments.epochs)
                else:
                    told = peer(place, data, model, arguments.epochs, peers[name], pythons[name])
                results[name].append(told)
                print(f"round {number + 1}/{arguments.rounds} {name}: {told}", file=sys.stderr)
                shutil.rmtree(place)
    document = {
        "schema": 1,
        "command": " ".join(["python", "bench/whole_job.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(read_machine()),
        "load_at_end": os.getloadavg(),
        "model": MODEL,
        "job": {
            "rows": arguments.rows,
            "batch_size": BATCH_SIZE,
            "epochs": arguments.epochs,
            "validation": VALIDATION,
            "lora": LORA,
        },
        "rounds": results,
        "summary": summarize(results),
    }
    print(json.dumps(document["summary"], indent=1))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--who", default=f"{OURS},TRL defaults,TRL best effort", help="names of bench/step/peers.py")
    return parser.parse_args()


def write_data(path: Path, count: int) -> None:
    """Prompt and completion as chats, which both read without settings."""
    with path.open("w", encoding="utf-8") as file:
        for system, question, answer in prompts_and_answers(count):
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            file.write(json.dumps({"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]}) + "\n")


def validate_every(rows_file: Path, epochs: int) -> int:
    """A peer's: twice in the job, half of its steps. Ours validates as often as its defaults say."""
    count = sum(1 for _ in rows_file.open(encoding="utf-8"))
    return max(1, int(count * (1 - VALIDATION)) * epochs // BATCH_SIZE // 2)


def ours(place: Path, data: Path, model: Path, epochs: int) -> dict[str, Any]:
    """`hivetune train` in a home that has what `hivetune fetch` leaves (model, kernels) and nothing else; validation as
    it comes by default."""
    own_home = place / "home"
    shutil.copytree(model, own_home / "models" / model.name)
    if (home() / "kernels").is_dir():
        shutil.copytree(home() / "kernels", own_home / "kernels")
    config = {
        "model": MODEL,
        "data": {"path": str(data), "validation": VALIDATION, "test": 0, "near_duplicates": 0},
        "lora": LORA,
        "batch_size": BATCH_SIZE,
        "epochs": epochs,
        "learning_rate": RATE,
        "patience": None,
        "output": str(place / "run"),
    }
    (place / "job.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "hivetune", "train", str(place / "job.yaml"), "--json"]
    # From the place itself, so that nothing of the clone is imported by accident.
    seconds, out = timed(command, {**os.environ, "HIVETUNE_HOME": str(own_home)}, place)
    assert (place / "run" / "adapter_model.safetensors").exists()
    document = json.loads(out)
    steps = [entry for entry in read_journal(place / "run" / METRICS) if entry["event"] == "step"]
    steps_s = sum(entry["seconds"] for entry in steps)
    return {"seconds": seconds, "steps": len(steps), "steps_s": steps_s, "loss_last": document["loss_last"]}


def peer(place: Path, data: Path, model: Path, epochs: int, row: Row, python: Path) -> dict[str, Any]:
    job = {
        "model": str(model),
        "data": str(data),
        "out": str(place / "run"),
        "options": row.options,
        "lora": PEER_LORA,
        "batch_size": BATCH_SIZE,
        "rate": RATE,
        "validation": VALIDATION,
        "epochs": epochs,
        "validate_every": validate_every(data, epochs),
    }
    command = [str(python), str(HERE / "step" / "workers" / "job.py"), json.dumps(job)]
    seconds, out = timed(command, {**environment(row), "HF_DATASETS_CACHE": str(place / "datasets")}, place)
    assert (place / "run" / "adapter_model.safetensors").exists()
    return {"seconds": seconds, **json.loads(out.splitlines()[-1])}


def timed(command: Sequence[str], variables: dict[str, str], folder: Path) -> tuple[float, str]:
    """Seconds from the start of the process to its end, and its standard output. Raises RuntimeError if it fails."""
    started = time.perf_counter()
    ended = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{command[:4]} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return time.perf_counter() - started, ended.stdout


def summarize(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """For each, as [first quartile, median, third quartile]: seconds, the job over its own optimizer steps, and times
    ours, paired by the round."""
    summary: dict[str, Any] = {}
    for name, rounds in results.items():
        seconds = [told["seconds"] for told in rounds]
        over_steps = [told["seconds"] / told["steps_s"] for told in rounds]
        summary[name] = {
            "seconds": quartiles(seconds),
            "steps": rounds[0]["steps"],
            "steps_s": quartiles([told["steps_s"] for told in rounds]),
            "job_over_steps": quartiles(over_steps),
        }
        if OURS in results:
            pairs = zip(seconds, results[OURS], strict=True)
            summary[name]["times_hivetune"] = quartiles([mine / other["seconds"] for mine, other in pairs])
    return summary


if __name__ == "__main__":
    main()
