"""`make proof`: runs the full counts behind one claim and writes `docs/proof/NAME.json`, for each NAME in PROOFS.

A proof is a pytest selection; its tests print nothing and record what they counted with the `record_property` fixture.
Resumable by name: `make proof NAME=kills` runs one; without a name those whose result is missing or of another commit.
A proof that takes long keeps its work below HIVETUNE_PROOF_FOLDER, which is there until it has passed: the same command
goes on where it was stopped.
"""

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "proof"
WORK = ROOT / ".cache" / "proof"
# name: (what it proves, pytest arguments)
PROOFS: dict[str, tuple[str, list[str]]] = {
    "sample-files": (
        "a sample of every named format, and logs that people have: each is read as it should be",
        ["tests/data/formats"],
    ),
    "served-families": (
        "40 architectures with random weights from rows to an answer over HTTP, each with its export proven",
        ["-m", "proof", "tests/release/test_served_families.py"],
    ),
    "planted-faults": (
        "10,000 rows with 200 planted faults: exactly those are rejected, each with its reason and line",
        ["-m", "proof", "tests/data/prepare/test_faults.py"],
    ),
    "redaction": (
        "1,360 labelled strings: at least 95 % of secrets and 90 % of personal data found, at most 1 % false alarms",
        ["tests/data/checks/test_redaction_corpus.py"],
    ),
    "properties": (
        "every property that `make test` checks on the same examples each time, on examples drawn anew",
        ["-m", "hypothesis and not proof", "tests"],
    ),
    "any-bytes": (
        "any bytes in never crash the check, and the sum always adds up",
        ["-m", "proof", "tests/data/prepare/test_any_bytes.py"],
    ),
    "collect-kills": (
        "kill -9 at random points of intake: every acknowledged row exactly once",
        ["-m", "proof", "tests/data/intake/test_collect_kill.py", "-k", "not fast_rotation"],
    ),
    "collect-rotation": (
        "33 runs in which a log is rotated 50 times, every 0.4 s, while its collectors are killed: "
        "every row exactly once",
        ["-m", "proof", "tests/data/intake/test_collect_kill.py", "-k", "fast_rotation"],
    ),
    "triton": (
        "the kernels for cards: whole steps equal to the plain ones in Triton's interpreter, and compiled, on a "
        "machine without a card, for CUDA 7.5, 8.0, 9.0, gfx906, gfx90a, gfx942, gfx1100 and gfx1201, within 64 KB of "
        "shared memory",
        ["-m", "proof", "tests/train/worker/model/test_triton.py"],
    ),
    "over-read": (
        "whole steps of every family give the same bits where NaN lies in all memory that was not written and beside "
        "each slice that a product reads",
        ["-m", "proof", "tests/train/worker/model/test_over_read.py"],
    ),
    "kills": (
        "100 kills of the worker and 20 of the supervisor: the same adapter, optimizer and plan, byte for byte",
        ["-m", "proof", "tests/train/supervise/test_kills.py"],
    ),
    "workers": (
        "one adapter hash for 1, 2 and 4 workers and for 3 of which 20 are killed or stopped in 200 steps; for 1 to 4 "
        "processes of torchrun",
        ["-m", "proof", "tests/train/supervise/test_workers.py", "tests/train/worker/test_ranks.py"],
    ),
    "cluster": (
        "a run on a real local Ray cluster whose machine is killed without notice and whose head is killed with -9 "
        "and comes back with the state of a real Redis: the adapter of one worker, byte for byte; a worker of another "
        "environment (HIVETUNE_OTHER_PYTHON: of another torch) takes part in one run",
        ["-m", "proof", "tests/cluster/test_cluster.py"],
    ),
    "streaming": (
        "frozen layers streamed by a reader of a known rate: the knee of a step's time over tokens is within 20 % of "
        "T* = b F / (2 B), every loss and gradient has the bits of layers that stay, and the process's peak is that of "
        "the layers that stay and three more",
        ["tests/train/worker/model/test_streaming_proof.py", "tests/train/worker/model/test_streaming.py"],
    ),
    "isolation": (
        "10,000 rows with 200 that give NaN and 3 that kill the worker: exactly those 203 are quarantined",
        ["-m", "proof", "tests/train/supervise/test_isolate_real.py"],
    ),
    "users_goal": (
        "10,000 rows, SmolLM2-135M, one epoch, with a kill, a NaN row and an error of hipBLASLt: ends by itself in "
        "less than 2 h with a loss below 3, exactly that row is quarantined, and the adapter answers in PEFT",
        ["-m", "proof", "tests/train/supervise/test_users_goal.py"],
    ),
    "report-to": (
        "MLflow, trackio and W&B get a run twice: the tool itself reads the journal's points, each once",
        ["-m", "proof", "tests/run/test_figures.py"],
    ),
    "tutorials": (
        "the commands of the three tutorials, run in their order as they stand there: all of them, with SmolLM2-135M "
        "where they name it, and a small random model with Qwen 2.5's template where they name that one",
        ["-m", "proof", "tests/docs/test_tutorials.py"],
    ),
    "cycle-gate": (
        "200 lives of 100 cycles whose candidates are as good as the champion: one takes its place in at most 5 % of "
        "the lives; none of 2,000 candidates of poisoned rows does; 90 % of real gains are found",
        ["-m", "proof", "tests/cycle/test_gate_lives.py"],
    ),
    "cycle-night": (
        "a loop that trains SmolLM2-135M beside its own gateway: its last process ends at most 1 % of the window after "
        "the window does, and the first token of a user's answer comes at most 1 s later than without it",
        ["-m", "proof", "tests/cycle/test_night_shift.py"],
    ),
    "cycle-poisons": (
        "30 unattended cycles, five of them with shuffled answers, a flood by one user, secrets, a broken base file, "
        "NaN rows: no champion is worse than the one before it on rows that no cycle saw",
        ["-m", "proof", "tests/cycle/test_poisons.py"],
    ),
    "cycle-watch": (
        "1,000 lives of an equally good release: at most 5 % are rolled back; one that is worse is rolled back in 95 %",
        ["-m", "proof", "tests/cycle/test_cycle_watch.py"],
    ),
    "families": (
        "every causal family that transformers knows, on a tiny random model: at least 90 % of those that are causal "
        "text models train with PEFT's loss and gradients (1e-5 in fp32), resume and merge; all others are refused",
        ["-m", "proof", "tests/train/worker/model/test_families.py"],
    ),
    "dropout": (
        "dropout with one mask for each computed token, prefixes shared: over 5,000 draws its mean gradient is that of "
        "separate masks for each row, within the standard error, in which a difference of 3 % would be seen",
        ["-m", "proof", "tests/train/worker/model/test_dropout.py"],
    ),
    "doctor": (
        "the whole doctor with its proof takes less than a minute on a quiet and healthy processor and blames nothing",
        ["-m", "proof", "tests/cli/test_doctor_proof.py"],
    ),
    "cycle-kills": (
        "16 cycles, three of them of poisoned rows, with 180 kills of the loop and of what it started at the borders "
        "of every act: cycles, adapters, accounting and aliases are those of the same cycles without kills",
        ["-m", "proof", "tests/cycle/test_kills_of_cycles.py"],
    ),
    "cycle-states": (
        "1.5 million abstract states of the cycle: each has an action, every action makes progress or waits with a "
        "time, none is taken twice",
        ["-m", "proof", "tests/cycle/test_every_state.py"],
    ),
    "gateway": (
        "10,000 requests of 16 clients through 20 swaps and 3 killed backends: none lost, none with another release's "
        "label, every stream that broke off counted, every captured answer stored once",
        ["-m", "proof", "tests/serve/gateway/test_gateway.py"],
    ),
    "synth": (
        "1,500 rows from documentation in less than two minutes, at least 20 of 24 categories filled; no option in an "
        "answer that its page does not have, by an extraction of its own; questions with 0.7 of the distinct-2 "
        "of real ones; less than 1 % near copies",
        ["-m", "proof", "tests/synth/test_synth_proof.py", "-k", "not 50_000"],
    ),
    "synth-many": (
        "50,000 rows from documentation take no more memory than a few pages do",
        ["-m", "proof", "tests/synth/test_synth_proof.py", "-k", "50_000"],
    ),
    "learn": (
        "a planted fault that is disliked where there is feedback, three seeds, 92 prompts: stage 2 takes it from "
        "about 30 % of the answers to at most 10 %, against stage 1 and stage 1 with as many steps; half the gain with "
        "a fifth of the labels wrong; shuffled labels never ship and gradient ascent is always stopped, ten of ten",
        ["-m", "proof", "tests/train/worker/test_planted_fault.py"],
    ),
    "null-draws": (
        "rows on which two models are equally good (skewed, heavy-tailed, mostly equal, in sessions, written five "
        "times, or 5 to 10 % much worse and the rest slightly better), n = 5 to 200, 1,000 draws each: the loss alone "
        "deploys in at most 4 %, nominal 2.5 %; and how often real gains deploy",
        ["-m", "proof", "tests/judge/test_wrong_verdicts.py"],
    ),
    "judge": (
        "each printed 95 % interval holds the truth in 93 to 97 % of 10,000 evaluations (n = 10, 30, 100; rows "
        "and sessions); an equal model is declared better in at most 5 % of 200 evaluations and of 200 lives of 30 "
        "nights; an improvement of the demo's size is found in at least 90 %",
        ["-m", "proof", "tests/judge/test_coverage.py"],
    ),
}
PACKAGES = ("torch", "transformers", "peft", "tokenizers", "xllamacpp", "gguf", "redis")


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in PROOFS]
    if unknown:
        sys.exit(f"no proof named {unknown[0]}\nhint: one of {', '.join(PROOFS)}")
    failed = [name for name in names or stale() if not prove(name)]
    if failed:
        sys.exit(f"not proven: {', '.join(failed)}")


def stale() -> list[str]:
    """Proofs whose result is missing or was made at another commit."""
    return [name for name in PROOFS if not (path := RESULTS / f"{name}.json").exists() or commit() != read(path)]


def read(path: Path) -> str:
    return str(json.loads(path.read_text())["commit"])


def prove(name: str) -> bool:
    claim, arguments = PROOFS[name]
    print(f"proof {name}: {claim}", flush=True)
    started = time.monotonic()
    (WORK / name).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HIVETUNE_PROOF_FOLDER": str(WORK / name), "HIVETUNE_EXAMPLES_PROFILE": "random"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--timeout=0", f"--junit-xml={report}", *arguments],
            cwd=ROOT,
            env=environment,
            check=False,
        ).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    result = {
        "schema": 1,
        "claim": claim,
        "command": f"make proof NAME={name}",
        "passed": code == 0,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - started),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in PACKAGES},
        "tests": [
            {
                "name": case.get("name"),
                "seconds": float(case.get("time", 0)),
                "passed": case.find("failure") is None and case.find("error") is None and case.find("skipped") is None,
                "counts": {entry.get("name"): entry.get("value") for entry in case.iter("property")},
            }
            for case in cases
        ],
    }
    if code == 0:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        shutil.rmtree(WORK / name)
    return code == 0


def commit() -> str:
    """The commit of the tree; `-dirty` when files of the project differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    dirty = subprocess.run(["git", "status", "--porcelain", "src", "tests"], cwd=ROOT, capture_output=True, text=True)
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
