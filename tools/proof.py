"""`make proof`: the full counts behind one claim; writes `docs/proof/NAME.json`.

    make proof               lists the proofs, and which results are stale
    make proof NAME=kills    runs one; its tests record what they counted with the `record_property` fixture

A result names the commit that it ran, and a hash of the code that it ran: the folders of the source that the proof
names, and its tests. It is stale when that code has changed since, and only then. A proof that takes long keeps its
work in HIVETUNE_PROOF_FOLDER until it has passed, so run it again to resume; the folder's name has the hash of the
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
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hivetune.base.typed import from_plain

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


def read_proofs() -> dict[str, Proof]:
    """Return the proofs of proofs.toml by their names."""
    entries = tomllib.loads(Path(__file__).with_name("proofs.toml").read_text(encoding="utf-8"))
    return {name: from_plain(Proof, entry) for name, entry in entries.items()}


PROOFS = read_proofs()


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
