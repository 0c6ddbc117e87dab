"""`make proof`: the full counts behind one claim; writes `docs/proof/NAME.json`.

    make proof               lists the proofs, and which results are stale
    make proof NAME=kills    runs one; its tests record what they counted with the `record_property` fixture

A result names the commit that it ran, and a hash of the code that it ran: the folders of the source that the proof
names, and its tests. It is stale when that code has changed since, and only then. A proof that takes long keeps its
work in HIVETUNE_PROOF_FOLDER until it has passed, so the same command continues; the folder's name has the hash of the
code, so work of other code is never counted.
"""

import datetime
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("docs", "proof")
WORK = Path(".cache", "proof")
PACKAGES = ("torch", "transformers", "peft", "tokenizers", "xllamacpp", "gguf", "redis")


@dataclass(frozen=True)
class Proof:
    """A claim, the tests that prove it, and the folders of `src/hivetune` that they run."""

    claim: str
    tests: tuple[str, ...]
    rooms: tuple[str, ...]
    marked: bool = True
    """Whether only the tests marked `proof` belong to it."""

    def paths(self) -> list[str]:
        return [*(f"src/hivetune/{room}" for room in self.rooms), *self.tests]


TRAINING = ("train", "process", "run", "base", "models")
PROOFS = {
    "kills": Proof(
        "100 kills of the worker and 20 of the supervisor: the same adapter, optimizer and plan, byte for byte",
        ("tests/train/supervise/test_kills.py",),
        TRAINING,
    ),
    "workers": Proof(
        "one adapter hash for any number of ranks, on one machine and on a real local Ray cluster, with ranks, machine "
        "and head killed",
        ("tests/train/supervise/test_workers.py", "tests/cluster"),
        TRAINING,
    ),
    "isolation": Proof(
        "10,000 rows with 200 that give NaN and 3 that kill the worker: exactly those 203 are quarantined",
        ("tests/train/supervise/test_isolate_real.py",),
        TRAINING,
    ),
    "users_goal": Proof(
        "10,000 rows, SmolLM2-135M, one epoch, with a kill, a NaN row and an error of hipBLASLt: ends by itself in "
        "less than 2 h with a loss below 3, exactly that row is quarantined, and the adapter answers in PEFT",
        ("tests/train/supervise/test_users_goal.py",),
        TRAINING,
    ),
    "engine": Proof(
        "dropout has the mean gradient of separate masks; streamed layers give the bits of layers that stay; no "
        "product reads memory that was not written; the peak of a step is as the plan says",
        ("tests/train/worker/model", "--ignore=tests/train/worker/model/test_families.py", "tests/train/plan"),
        ("train/worker", "train/plan"),
    ),
    "families": Proof(
        "every causal family that transformers knows, on a tiny random model: at least 90 % train with PEFT's loss and "
        "gradients, resume and merge, all others are refused; 40 are exported and answer over HTTP",
        ("tests/train/worker/model/test_families.py", "tests/release", "tests/llama/test_thinking.py"),
        ("train/worker", "models", "release", "llama"),
    ),
    "collect": Proof(
        "kill -9 at random points of intake, also while a log is rotated: every acknowledged row exactly once",
        ("tests/data/intake",),
        ("data/intake", "base"),
    ),
    "redaction": Proof(
        "labelled strings: at least 87 % of secrets and 90 % of personal data found, at most 0.5 % false alarms",
        ("tests/data/checks/test_redaction_corpus.py",),
        ("data/checks",),
        marked=False,
    ),
    "rows": Proof(
        "10,000 rows with 200 planted faults: exactly those are rejected, each with its reason and line; any bytes "
        "never crash the check; 1,500 rows from documentation name no option that their page does not have",
        ("tests/data/prepare", "tests/synth"),
        ("data", "synth"),
    ),
    "judge": Proof(
        "each printed 95 % interval holds the truth in 93 to 97 % of 10,000 evaluations; an equal model deploys in at "
        "most 5 %; an improvement of the demo's size is found in at least 90 %",
        ("tests/judge", "--ignore=tests/judge/test_null_draws.py"),
        ("judge",),
    ),
    "null-draws": Proof(
        "a model without an effect deploys by its loss in at most 4.5 % of 5,000 draws in each of 16 worlds and six "
        "sizes, and in 3.5 % on average; 0.05 nats are found on 100 rows in at least 80 %",
        ("tests/judge/test_null_draws.py",),
        ("judge/statistics.py",),
    ),
    "gateway": Proof(
        "10,000 requests of 16 clients through 20 swaps and 3 killed backends: none lost, none with another release's "
        "label, every stream that broke off counted, every captured answer stored once",
        ("tests/serve",),
        ("serve", "llama", "release", "process", "base"),
    ),
    "cycle-kills": Proof(
        "16 cycles with 180 kills of the loop and of what it started: cycles, adapters, accounting and aliases are "
        "those of the same cycles without kills",
        ("tests/cycle/test_kills_of_cycles.py",),
        (*TRAINING, "cycle", "judge", "release", "data"),
    ),
    "cycle-poisons": Proof(
        "30 unattended cycles, five of them poisoned: no champion is worse than the one before it on rows that no "
        "cycle saw; equal candidates seldom replace a champion, and a worse one is rolled back",
        ("tests/cycle", "--ignore=tests/cycle/test_kills_of_cycles.py"),
        ("cycle", "judge", "release", "data", "serve"),
    ),
    "exporters": Proof(
        "TensorBoard, MLflow, trackio and W&B, each killed 10 times: the tool has the journal's points, each once",
        ("tests/run",),
        ("run", "base"),
    ),
    "tutorials": Proof(
        "the commands of the tutorials, run in their order as they stand there",
        ("tests/docs/test_tutorials.py", "docs/tutorial-chats.md", "docs/tutorial-agent.md", "docs/tutorial-csv.md"),
        (".",),
    ),
}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in PROOFS]
    if unknown:
        sys.exit(f"no proof named {unknown[0]}\nhint: one of {', '.join(PROOFS)}")
    if not names:
        for name, proof in PROOFS.items():
            print(f"{name:<14}{state(ROOT, name, proof)}")
        return
    failed = [name for name in names if not prove(name)]
    if failed:
        sys.exit(f"not proven: {', '.join(failed)}")


def state(root: Path, name: str, proof: Proof) -> str:
    """Return whether the result of a proof is up to date, stale or missing, and which commit it ran."""
    path = root / RESULTS / f"{name}.json"
    if not path.exists():
        return "never run"
    result = json.loads(path.read_text())
    is_current = result.get("code") == code_hash(root, proof.paths())
    return f"{'up to date' if is_current else 'stale'}: {result['date']}, commit {result['commit']}"


def code_hash(root: Path, paths: list[str]) -> str:
    """Return the SHA-256 of the committed files below these paths, whatever their history."""
    files = [path for path in paths if not path.startswith("--")]
    listed = subprocess.run(["git", "ls-tree", "-r", "HEAD", "--", *files], cwd=root, capture_output=True, check=True)
    return hashlib.sha256(listed.stdout).hexdigest()


def changed_files(root: Path, paths: list[str]) -> list[str]:
    """Return the files below these paths that differ from the commit."""
    files = [path for path in paths if not path.startswith("--")]
    command = ["git", "status", "--porcelain", "--", *files]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


def prove(name: str) -> bool:
    proof = PROOFS[name]
    if changed := changed_files(ROOT, proof.paths()):
        sys.exit(f"{changed[0].strip()} is not committed, so a result could not name what it ran\nhint: commit it")
    code = code_hash(ROOT, proof.paths())
    print(f"proof {name}: {proof.claim}", flush=True)
    started = time.monotonic()
    work = ROOT / WORK / f"{name}-{code[:12]}"
    resumed = work.exists()
    work.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HIVETUNE_PROOF_FOLDER": str(work), "HIVETUNE_EXAMPLES_PROFILE": "random"}
    selection = [argument for argument in proof.tests if not argument.endswith(".md")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--timeout=0", f"--junit-xml={report}", *selection]
        command += ["-m", "proof"] if proof.marked else []
        passed = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if not passed:
        return False
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    result = {
        "schema": 2,
        "claim": proof.claim,
        "command": f"make proof NAME={name}",
        "commit": head.stdout.strip(),
        "code": code,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - started),
        "resumed": resumed,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in PACKAGES},
        "tests": [
            {
                "name": case.get("name"),
                "seconds": float(case.get("time", 0)),
                "counts": {entry.get("name"): entry.get("value") for entry in case.iter("property")},
            }
            for case in cases
        ],
    }
    (ROOT / RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(work)
    return True


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
