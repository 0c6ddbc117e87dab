"""Rows a second and memory of checking and preparing data, and of the usual alternatives on the same file.

    python bench/data.py [--rows 1000000] [--model smollm2-135m] [--work FOLDER]

Makes its file on the spot: chat rows of about 500 bytes, cut from Python's own documentation, one in a hundred an
exact and one in a hundred a near duplicate, one in two hundred with an e-mail address or a key in it. Each case runs in
a fresh process with a fresh home. Memory is the peak of anonymous memory summed over all its processes, less what the
same number of bare interpreters holds (Linux: /proc/PID/smaps_rollup). TRL is measured as it comes: loss on all tokens,
no checks, no duplicates removed.
"""

import argparse
import importlib.util
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SAMPLE_EVERY_S = 0.1
CASES: dict[str, dict[str, Any]] = {
    "check + tokenise, exact dedupe": {"near_duplicates": 0, "on_private": "keep"},
    "+ secrets and personal data": {"near_duplicates": 0},
    "+ near duplicates (all defaults)": {},
}
PREPARE = """
import json, sys
from pathlib import Path
from hivetune.config import RunConfig
from hivetune.data.prepare.prepare import prepare
config = RunConfig.model_validate(json.loads(sys.argv[1]))
prepare(config, Path(config.model))  # walk.prepare would first make the model ready in the fresh home
"""


def write_rows(path: Path, num_rows: int) -> None:
    """The same file on every call with the same Python."""
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).split()
    rng = random.Random(7)
    last: tuple[list[str], list[str]] = ([], [])
    with open(path, "w", encoding="utf-8") as file:
        for number in range(num_rows):
            start = rng.randrange(len(words) - 120)
            asked = words[start : start + 8 + rng.randrange(12)]
            answer = words[start + 20 : start + 40 + rng.randrange(50)]
            for _ in range(6):  # or the same slice of the text would come twice
                answer[rng.randrange(len(answer))] = rng.choice(words)
            if number % 100 == 50:
                asked, answer = [*last[0]], [*last[1]]
                answer[rng.randrange(len(answer))] = "changed"
            elif number % 200 == 10:
                answer[3] = f"jane.doe{number}@mail{number % 97}.org" if number % 400 == 10 else "ghp_" + "a1B2" * 9
            turns = [{"role": "user", "content": " ".join(asked)}, {"role": "assistant", "content": " ".join(answer)}]
            line = json.dumps({"messages": turns, "session": f"s{number // 3}", "agent": f"agent{number % 5}"})
            last = (asked, answer)
            file.write(line + "\n")
            if number % 100 == 0:
                file.write(line + "\n")


def anonymous_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous:"))
    return total


def family(pid: int) -> list[int]:
    """The process and everything it started."""
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except OSError:
            continue
        found += [int(child) for child in children]
    return found


class Measured(NamedTuple):
    seconds: float
    cpu_seconds: float  # of all processes; on a busy machine the better number
    memory_bytes: int


def measure(command: list[str], environment: dict[str, str]) -> Measured:
    started, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    peak = most = 0
    while process.poll() is None:
        pids = family(process.pid)
        peak, most = max(peak, anonymous_bytes(pids)), max(most, len(pids))
        time.sleep(SAMPLE_EVERY_S)
    seconds, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode not in (0, 3):
        sys.exit(f"{command} ended with {process.returncode}")
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Measured(seconds, cpu, peak - most * bare_interpreter_bytes())


def bare_interpreter_bytes() -> int:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    time.sleep(0.3)
    size = anonymous_bytes([process.pid])
    process.communicate(b"\n")
    return size


def run_case(rows: Path, model: Path, settings: dict[str, Any], work: Path) -> Measured:
    home = Path(tempfile.mkdtemp(dir=work))
    config = json.dumps({"model": str(model), "data": {"path": str(rows), **settings}})
    try:
        return measure([sys.executable, "-c", PREPARE, config], {**os.environ, "HIVETUNE_HOME": str(home)})
    finally:
        shutil.rmtree(home)


TRL = """
import os, sys, datasets, trl
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
rows = datasets.load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
tokenizer.pad_token = tokenizer.unk_token
size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))  # the trainer wants one; it is not run
cores = os.cpu_count()
settings = trl.SFTConfig(sys.argv[3], dataset_num_proc=cores, max_length=2048, report_to=[], use_cpu=True, bf16=False)
print(len(trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer).train_dataset))
"""


def run_peer(script: str, rows: Path, model: Path, work: Path) -> Measured:
    cache = tempfile.mkdtemp(dir=work)
    try:
        return measure([sys.executable, "-c", script, str(rows), str(model), cache], dict(os.environ))
    finally:
        shutil.rmtree(cache)


def line(name: str, rows: int, measured: Measured) -> None:
    seconds, cpu, memory = measured
    print(f"| {name} | {rows:,} | {seconds:.1f} | {cpu:.1f} | {rows / seconds:,.0f} | {memory / 1e6:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", default="smollm2-135m", help="a prepared model folder, or what hivetune fetch takes")
    parser.add_argument("--work", type=Path, default=None, help="needs about 4 kB a row")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=arguments.work))
    try:
        model = Path(arguments.model)
        if not (model / "tokenizer.json").exists():
            from hivetune.models.prepared import fetch_model

            model = fetch_model(arguments.model)
        rows = work / "rows.jsonl"
        write_rows(rows, arguments.rows)
        print(f"{arguments.rows:,} rows, {rows.stat().st_size / 1e6:.0f} MB, {os.cpu_count()} cores\n")
        print("| case | rows | seconds | CPU seconds | rows/s | memory MB |\n|---|---:|---:|---:|---:|---:|")
        for name, settings in CASES.items():
            if arguments.only in name:
                line(name, arguments.rows, run_case(rows, model, settings, work))
        small = work / "small.jsonl"
        write_rows(small, 10_000)
        if arguments.only in "10,000 rows":
            line("10,000 rows, all defaults", 10_000, run_case(small, model, {}, work))
        name = "datasets + TRL's preparation (SFTTrainer made, not run)"
        if arguments.only in name and importlib.util.find_spec("trl"):
            line(name, arguments.rows, run_peer(TRL, rows, model, work))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
