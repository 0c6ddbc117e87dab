"""Do the demo's three agents need experts, and what does an adapter more cost? SmolLM2-135M, by the real stations.

    python bench/experts.py share --home FOLDER           the demo's rows and its shared adapter: 120 steps
    python bench/experts.py look --home FOLDER            `hivetune experts --train` on it
    python bench/experts.py costs --home FOLDER           memory and tokens/s of the family's adapters in one llama.cpp
    python bench/experts.py report --home FOLDER --out docs/proof/bench_experts.json

FOLDER keeps everything: a piece that was stopped goes on where it was, one that is done is not done again. About
fifteen minutes on two cores, most of them in the first two pieces. Whatever comes out is printed; nothing has to pass.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import read_json, write_json
from hivetune.config import RunConfig, load_config
from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.machine.inventory import describe_machine, read_machine
from hivetune.records import Progress
from hivetune.release.gguf import SERVED_QUANT, base_gguf
from hivetune.release.registry import find, promote
from hivetune.routing.steps import newest_steps
from hivetune.serve.register import register_run
from hivetune.serve.swap.wanted import load_release
from hivetune.specialists.costs import rates_of
from hivetune.specialists.routes import routes_document
from hivetune.specialists.station import train_specialists
from hivetune.specialists.survey import Attended
from hivetune.synth.demo import write_inputs
from hivetune.train.probe import probe_run
from hivetune.train.start import open_run, train_run

SHARED = "demo"
QUESTIONS = [
    [{"role": "user", "content": f"Count from {start} upwards, one number after the other, and never stop."}]
    for start in (1, 30, 700)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ["HIVETUNE_HOME"] = str(asked.home.resolve())
    config = load_config(write_inputs(asked.home / "demo"), [f"experts.shared={SHARED}"])
    started, busy = time.monotonic(), time.process_time()
    found = PIECES[asked.piece](config)
    if asked.piece != "report":
        spent = {"minutes": round((time.monotonic() - started) / 60, 1), "load_at_the_end": os.getloadavg()[0]}
        print(f"own processor time {time.process_time() - busy:.0f} s", spent, flush=True)
        write_json(asked.home / f"{asked.piece}.json", {"schema": 1, **spent, **found})
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


def share(config: RunConfig) -> dict[str, Any]:
    """Trained as the demo does it, and promoted without a verdict, which costs minutes and says nothing of experts."""
    run = open_run(config, SHARED, bar("preparing"))
    probe_run(run)
    trained = train_run(run)
    release, _ = register_run(run.folder, SHARED)
    with closing(open_database()) as database:
        promote(database, release.label, by="bench", reason="what experts are held against", force=True)
    told = ("loss_first", "loss_last", "best", "steps", "tokens_per_second", "restarts")
    return {"release": release.label, "rows": trained["rows"], **{name: trained[name] for name in told}}


def look(config: RunConfig) -> dict[str, Any]:
    made = train_specialists(config, Attended(bar))
    domains = [
        {
            "domain": step.domain.label,
            "rows": len(made.survey.rows_of(step.domain)),
            "is": step.step,
            "why": step.reason,
            "measured": {
                name: step.details[name] for name in ("screen", "gain", "over_shared") if name in step.details
            },
        }
        for step in made.steps
    ]
    return {"domains": domains, "routed": None if made.routed is None else routes_document(made.routed)}


def costs(config: RunConfig) -> dict[str, Any]:
    """Of the shared adapter, loaded once and several times: experts have the same rank on the same layers."""
    with closing(open_database()) as database:
        shared = find(database, SHARED)
    adapter = load_release(shared).adapter
    base = base_gguf(shared.model, shared.model_sha256, SERVED_QUANT)
    return {
        "adapter_file_bytes": adapter.stat().st_size,
        "base_file_bytes": base.stat().st_size,
        "anonymous_memory_bytes": {str(count): memory_of(base, [adapter] * count) for count in (0, 1, 2, 4, 8)},
        "tokens_per_s": speeds_of(base, [adapter] * 2),
        "two_slots_tokens_per_s": {
            name: throughput(base, [adapter] * 2, turns) for name, turns in (("one adapter", (0, 0)), ("two", (0, 1)))
        },
    }


def memory_of(base: Path, adapters: Sequence[Path]) -> int:
    """What the server holds beside the mapped file of the base, after an answer under each adapter."""
    settings = ServerSettings(adapters=tuple((path, 0.0) for path in adapters), context_tokens=1024)
    with open_backend(base, settings) as backend:
        for number in range(max(1, len(adapters))):
            backend.complete(QUESTIONS[0], max_tokens=4, adapter=number if adapters else None)
        return anonymous_bytes(backend.process.pid)


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def speeds_of(base: Path, adapters: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Of prompts and of answers, one at a time, the base and the adapters in turns."""
    settings = ServerSettings(adapters=tuple((path, 0.0) for path in adapters), context_tokens=1024)
    with open_backend(base, settings) as backend:
        rates = rates_of(backend, len(adapters), QUESTIONS * 3)
    names = ["base", "shared", "expert"]
    return {name: {"prompt": rate[0], "written": rate[1]} for name, rate in zip(names, rates, strict=True)}


def throughput(base: Path, adapters: Sequence[Path], turns: Sequence[int]) -> float:
    """Tokens/s of twelve answers, two at a time: llama.cpp computes those of one adapter together, of two never."""
    settings = ServerSettings(adapters=tuple((path, 0.0) for path in adapters), slots=2, context_tokens=1024)
    with open_backend(base, settings) as backend, ThreadPoolExecutor(2) as pool:

        def ask(number: int) -> int:
            chosen = turns[number % len(turns)]
            return backend.complete(QUESTIONS[number % len(QUESTIONS)], max_tokens=32, adapter=chosen).new_tokens

        ask(0)
        started = time.monotonic()
        tokens = sum(pool.map(ask, range(12)))
        return round(tokens / (time.monotonic() - started), 1)


def report(config: RunConfig) -> dict[str, Any]:
    home = Path(os.environ["HIVETUNE_HOME"])
    with closing(open_database()) as database:
        steps = [step.step for step in newest_steps(database, SHARED).values()]
    found = {piece: read_json(home / f"{piece}.json") for piece in PIECES if (home / f"{piece}.json").exists()}
    return {
        "schema": 1,
        "machine": describe_machine(read_machine()),
        "date": time.strftime("%Y-%m-%d"),
        "experts": steps,
        **found,
    }


def bar(label: str) -> Progress:
    """A line a minute."""
    last = time.monotonic()

    def progress(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > 60 or done == total:
            last = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} {label}: {done} of {total}", flush=True)

    return progress


PIECES: dict[str, Callable[[RunConfig], dict[str, Any]]] = {
    "share": share,
    "look": look,
    "costs": costs,
    "report": report,
}


if __name__ == "__main__":
    main()
