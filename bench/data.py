"""Rows a second and memory of checking and preparing data.

    python bench/data.py [--rows 1000000] [--model smollm2-135m]

Makes its file on the spot: chat rows of about 500 bytes, cut from Python's own documentation, one in a hundred an
exact and one in a hundred a near duplicate, one in two hundred with an e-mail address or a key in it. Each case runs in
a fresh process with a fresh home. Memory is the peak of all its processes' own memory.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from hivetune.models.prepared import fetch_model

SAMPLE_EVERY_S = 0.1
CASES: dict[str, dict[str, Any]] = {
    "check + tokenise, exact dedupe": {"near_duplicates": 0, "on_private": "keep"},
    "+ secrets and personal data": {"near_duplicates": 0},
    "+ near duplicates (all defaults)": {},
}
PREPARE = """
import json, sys, time
from pathlib import Path
from hivetune.config import RunConfig
from hivetune.data.prepare.prepare import prepare
config = RunConfig.model_validate(json.loads(sys.argv[1]))
read = []
def progress(done, total):
    if done and total is None:  # all rows are read
        read.append(time.perf_counter())
prepare(config, Path(config.model), progress)  # walk.prepare would first make the model ready in the fresh home
print(time.perf_counter() - read[0])
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
            file.write(f"{line}\n" * (2 if number % 100 == 0 else 1))


def memory_bytes(process: psutil.Process) -> int:
    """Return what a process and all that it started hold alone."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return total


def measure(rows: Path, model: Path, settings: dict[str, Any]) -> tuple[float, float, float, int]:
    """Return seconds, those after the last row was read (duplicates, splits, report and snapshot), processor seconds of
    all processes (on a busy machine the better number) and bytes."""
    config = json.dumps({"model": str(model), "data": {"path": str(rows), **settings}})
    with tempfile.TemporaryDirectory(dir=rows.parent) as home:
        started, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "HIVETUNE_HOME": home}
        process = psutil.Popen([sys.executable, "-c", PREPARE, config], env=environment, stdout=subprocess.PIPE)
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory_bytes(process))
            time.sleep(SAMPLE_EVERY_S)
        seconds, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode != 0 or process.stdout is None:
        sys.exit(f"the preparation ended with {process.returncode}")
    return seconds, float(process.stdout.read()), now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", default="smollm2-135m", help="what hivetune fetch takes")
    arguments = parser.parse_args()
    model = fetch_model(arguments.model)
    with tempfile.TemporaryDirectory() as work:
        rows = Path(work, "rows.jsonl")
        write_rows(rows, arguments.rows)
        print(f"{arguments.rows:,} rows, {rows.stat().st_size / 1e6:.0f} MB, {os.cpu_count()} cores\n")
        print("| case | seconds | after reading | CPU seconds | rows/s | memory MB |\n|---|---:|---:|---:|---:|---:|")
        for name, settings in CASES.items():
            seconds, behind, cpu, memory = measure(rows, model, settings)
            rate = arguments.rows / seconds
            print(
                f"| {name} | {seconds:.1f} | {behind:.1f} | {cpu:.1f} | {rate:,.0f} | {memory / 1e6:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
