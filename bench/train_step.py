"""One LoRA step, ours against the peers': the same rows, masks, order, adapter and optimizer, turn by turn.

Each row of the results is a process of its own that stays loaded; a clock gives them their turns, step by step, so that
a slow minute of the machine hits all of them. One step of every row is a round: what is said about two rows are medians
over the rounds of their ratio in that round, with the quartiles. Rows whose loss curve leaves the reference's are void.

    python bench/train_step.py --out docs/measured/bench_cpu.json          the whole, about 25 minutes on 2 cores
    python bench/train_step.py --full-precision --out bench_fp32.json          as on a processor without bfloat16
    python bench/train_step.py --sets agents --rows "hivetune,rank 64"
    python bench/train_step.py --device cuda:0 --random 1.5b --sets agents     random weights of true shapes, on a card
"""

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from step.peers import FLOAT32_ROWS, ROWS, Row, environment, python_of
from step.report import summarize, write_report
from step.rows import SETS, Set, write_random_rows, write_rows

from hivetune.base.disk import home
from hivetune.base.typed import to_plain
from hivetune.machine.inventory import read_machine
from hivetune.models.architecture import read_architecture
from hivetune.models.prepared import fetch_model

LORA = {"r": 8, "alpha": 16}
RATE = 2e-4
MODEL = "smollm2-135m"
TURN_S = 600.0
# Qwen 2.5's shapes: hidden, MLP, layers, heads, key-value heads, vocabulary.
SIZES = {
    "tiny": (64, 128, 2, 4, 2, 512),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 151936),
}
HERE = Path(__file__).resolve().parent


@dataclass
class Worker:
    """A row's process and its pipes."""

    row: Row
    process: "subprocess.Popen[bytes]"
    to: Any
    back: int
    started: float = field(default_factory=time.perf_counter)
    ready_s: float | None = None
    buffer: bytes = b""

    def go(self) -> None:
        self.to.write("go\n")
        self.to.flush()

    def hear(self) -> dict[str, Any]:
        """Its next line. Raises RuntimeError when it ended or says nothing for too long."""
        while b"\n" not in self.buffer:
            if not select.select([self.back], [], [], TURN_S)[0]:
                raise RuntimeError(f"{self.row.name} says nothing for {TURN_S:.0f} s")
            chunk = os.read(self.back, 65536)
            if not chunk:
                raise RuntimeError(f"{self.row.name} ended with {self.process.wait()}")
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.to.close()
        os.close(self.back)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def main() -> None:
    arguments = parse()
    began = time.perf_counter()
    cache = home() / "bench"
    wanted = arguments.rows.split(",") if arguments.rows else [row.name for row in ROWS if not row.asked_for]
    if arguments.full_precision:
        wanted = list(FLOAT32_ROWS)
    rows = [row for row in ROWS if row.name in wanted]
    sets = [chosen for chosen in SETS if chosen.name in arguments.sets.split(",")]
    model = random_model(arguments.random, cache) if arguments.random else fetch_model(MODEL)
    architecture = read_architecture(model)
    pythons = {row.name: python for row in rows if (python := interpreter(row, cache))}
    measured_from = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.json"
        if arguments.random:
            about = write_random_rows(data, architecture.vocabulary, arguments.steps)
        else:
            about = write_rows(data, model / "tokenizer.json", arguments.steps)
        adapter = write_adapter(model, Path(folder) / "adapter.safetensors", pythons)
        job = {"model": str(model), "data": str(data), "adapter": str(adapter), "lora": LORA, "rate": RATE}
        job["device"] = arguments.device
        results = run_all(rows, sets, pythons, job, folder)
    document = {
        "schema": 1,
        "command": " ".join(["python", "bench/train_step.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": to_plain(read_machine()),
        "model": arguments.random or MODEL,
        "device": arguments.device,
        "parameters": architecture.parameters,
        "lora": LORA,
        "data": about,
        "setup_s": round(measured_from - began, 1),
        "seconds": round(time.perf_counter() - measured_from, 1),
        "rows": {row.name: {"about": row.about, "packages": list(row.packages)} for row in rows},
        "results": results,
    }
    document["summary"] = summarize(document, {chosen.name: chosen.title for chosen in sets})
    write_report(document, Path(arguments.out) if arguments.out else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file; the table is written beside it")
    parser.add_argument("--steps", type=int, default=13, help="steps of each set; the first warms up (13: 12 rounds)")
    parser.add_argument("--sets", default=",".join(chosen.name for chosen in SETS))
    parser.add_argument("--rows", default="", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--full-precision", action="store_true", help="ours and TRL's best effort, both in float32")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0 for an NVIDIA or AMD card")
    parser.add_argument(
        "--random", choices=list(SIZES), default="", help="random weights of this shape, and random rows"
    )
    return parser.parse_args()


def random_model(size: str, cache: Path) -> Path:
    """Return a folder with a Qwen 2.5 of this size with random weights; made on first use, in a child."""
    folder = cache / f"random-{size}"
    if not (folder / "config.json").exists():
        code = (
            "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM; torch.manual_seed(1);"
            "h, m, l, a, k, v = map(int, sys.argv[2:]);"
            "c = AutoConfig.for_model('qwen2', hidden_size=h, intermediate_size=m, num_hidden_layers=l,"
            " num_attention_heads=a, num_key_value_heads=k, vocab_size=v, tie_word_embeddings=h < 3000);"
            "AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16).save_pretrained(sys.argv[1])"
        )
        subprocess.run([sys.executable, "-c", code, str(folder), *map(str, SIZES[size])], check=True)
    return folder


def interpreter(row: Row, cache: Path) -> Path | None:
    """The row's Python, or None with a line on why it is left out."""
    try:
        return python_of(row, cache)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"{row.name} is left out: {error}", file=sys.stderr)
        return None


def write_adapter(model: Path, target: Path, pythons: dict[str, Path]) -> Path:
    """One initial adapter for all, made by our own initialisation; a child, so that torch stays out of the clock."""
    code = (
        "import sys, torch; from pathlib import Path; from safetensors.torch import save_file;"
        "from hivetune.config import LoraConfig; from hivetune.train.worker.model.load import load_model;"
        "from hivetune.train.worker.model.adapter import initialise;"
        "m = load_model(Path(sys.argv[1]), LoraConfig(r=int(sys.argv[3]), alpha=float(sys.argv[4])), method='lora',"
        " dtype=torch.float32, device=torch.device('cpu'));"
        "initialise(m.adapter, 0); save_file({k: v.contiguous().clone() for k, v in m.adapter.items()}, sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(model), str(target), str(LORA["r"]), str(LORA["alpha"])]
    subprocess.run(command, check=True)
    return target


def run_all(
    rows: Sequence[Row], sets: Sequence[Set], pythons: dict[str, Path], job: dict[str, Any], folder: str
) -> list[dict[str, Any]]:
    """Every set. Workers stay loaded from one set to the next."""
    workers: dict[str, Worker] = {}

    def start_row(row: Row) -> Worker:
        own = [chosen.name for chosen in sets if chosen.name in row.sets]
        return start(row, pythons[row.name], {**job, "sets": own, "options": row.options}, folder)

    content = json.loads(Path(job["data"]).read_text())["sets"]
    results: list[dict[str, Any]] = []
    try:
        for chosen in sets:
            taking_part = [row for row in rows if row.name in pythons and chosen.name in row.sets]
            results += run_set(chosen.name, taking_part, workers, start_row, len(content[chosen.name]["steps"]))
    finally:
        for worker in workers.values():
            worker.end()
    return results


def run_set(
    name: str, rows: Sequence[Row], workers: dict[str, Worker], start_row: Callable[[Row], Worker], steps: int
) -> Iterator[dict[str, Any]]:
    """All steps of one set, each by every row in turn; the order of the rows changes from step to step."""
    about: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    told: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    for row in rows:  # one after the other: their loading is timed
        worker = workers.get(row.name) or start_row(row)
        workers[row.name] = worker
        try:
            worker.go()
            about[row.name] = worker.hear()
        except (RuntimeError, OSError) as error:
            failed[row.name] = str(error)
        worker.ready_s = worker.ready_s or time.perf_counter() - worker.started
    for step in range(steps):
        shift = step % len(rows)
        for row in [*rows[shift:], *rows[:shift]]:
            if row.name in failed:
                continue
            try:
                workers[row.name].go()
                told[row.name].append(workers[row.name].hear())
            except (RuntimeError, OSError) as error:
                failed[row.name] = str(error)
            print(
                f"{name} {step + 1}/{steps} {row.name}: {_words(told[row.name], failed.get(row.name))}", file=sys.stderr
            )
    for row in rows:
        yield {
            "set": name,
            "row": row.name,
            "failed": failed.get(row.name),
            "own_curve": row.own_curve,
            "load_s": workers[row.name].ready_s,
            "steps": told[row.name],
            **about.get(row.name, {"dtype": "", "path": "", "bare_bytes": 0}),
        }


def _words(steps: Sequence[dict[str, Any]], failed: str | None) -> str:
    if failed is not None or not steps:
        return failed or "nothing yet"
    loss = steps[-1].get("loss")
    return f"{steps[-1]['seconds']:.3f} s" + (f", loss {loss:.4f}" if loss is not None else "")


def start(row: Row, python: Path, job: dict[str, Any], folder: str) -> Worker:
    file = Path(folder) / f"{row.name.replace(' ', '-')}.json"
    file.write_text(json.dumps(job))
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with open(Path(folder) / f"{file.stem}.log", "ab") as log:
        process = subprocess.Popen(
            [str(python), str(HERE / "step" / "workers" / row.worker), str(file)],
            env={**environment(row, job["device"]), "BENCH_IN": str(their_in), "BENCH_OUT": str(their_out)},
            pass_fds=(their_in, their_out),
            stdout=log,
            stderr=None if os.environ.get("BENCH_SHOW") else log,
        )
    os.close(their_in)
    os.close(their_out)
    return Worker(row, process, os.fdopen(our_out, "w"), our_in)


if __name__ == "__main__":
    main()
