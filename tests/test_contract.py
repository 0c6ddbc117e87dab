"""What scripts rely on: the commands, the keys of each one's `--json`, its exit code, and the files of a home.

`contract/home.py` fills a home, and `contract/contract.json` holds what the commands say of it. To accept a wanted
change, run this test with HIVETUNE_WRITE_CONTRACT=1 and say in CHANGELOG.md what users have to change.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import hivetune
from contract.home import make_home

from hivetune.cli.main import COMMANDS

pytestmark = pytest.mark.slow

CONTRACT = Path(__file__).parent / "contract" / "contract.json"
LINES = (
    "status",
    "runs",
    "show last",
    "show last --log",
    "check rows.jsonl",
    "plan cycle.yaml",
    "train last",
    "eval last --set gate.loss_gain=0",
    "releases",
    "releases demo@1",
    "clients",
    "cycle status",
    "cycle cycle.yaml --dry-run",
    "rm --unused",
    "config",
    "doctor killed",
    "export last --to gguf-adapter",
    "register last --as again",
    "promote again@1 --force --reason contract",
    "rollback again",
    "releases --retire again",
    "chat last --prompt hi --max-tokens 2",
    "forget --user u3",
    "train missing.yaml",
    "show nothing-of-this-name",
)
# Keys below these are data: reasons, names of measures, settings, and what happened in a run (how long it took decides
# whether it has samples of the machine).
DATA = {
    "events[]",
    "rejected",
    "set_aside",
    "quarantined",
    "settings",
    "defaults",
    "properties",
    "$defs",
    "by",
    "layouts",
}


def shape(value: Any, path: str = "") -> set[str]:
    """Dotted keys of a document; `[]` for the entries of a list."""
    if isinstance(value, dict) and path.rpartition(".")[2] not in DATA:
        return {path, *(key for name, one in value.items() for key in shape(one, f"{path}.{name}".lstrip(".")))} - {""}
    if isinstance(value, list):
        return {path, *(key for one in value for key in shape(one, f"{path}[]"))}
    return {path}


def files_of(folder: Path) -> list[str]:
    """Names of the files below a folder; hashes and numbers of steps stand as `*`."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file():
            parts = path.relative_to(folder).parts
            found.add(
                "/".join("*" if (len(part) >= 12 and part.isalnum()) or part.isdigit() else part for part in parts)
            )
    return sorted(found)


def call(place: Path, line: str) -> tuple[int, list[Any]]:
    """Return the exit code and the documents of `hivetune LINE --json`."""
    done = hivetune(*line.split(), "--json", cwd=place)
    try:
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]
    except json.JSONDecodeError:
        pytest.fail(f"{line}: {done.stdout}{done.stderr}")


def test_commands_answer_as_they_did(tmp_path: Path, own_home: Path) -> None:
    make_home(tmp_path, lambda line: call(tmp_path, line))
    seen: dict[str, Any] = {"commands": sorted(COMMANDS)}
    for line in LINES:
        code, documents = call(tmp_path, line)
        if line.startswith("eval "):
            assert code in (0, 6)  # times decide too
            code = 6
        seen[line] = {"exit": code, "keys": sorted(set().union(*map(shape, documents)))}
    (run,) = (own_home / "cycles" / "demo").glob("**/run.json")
    seen["files of a run"] = files_of(run.parent)
    seen["files of a release"] = files_of(own_home / "releases" / "again" / "1")
    seen["files of the home"] = sorted({name.partition("/")[0] for name in files_of(own_home)})
    if os.environ.get("HIVETUNE_WRITE_CONTRACT") == "1":
        CONTRACT.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    known = json.loads(CONTRACT.read_text(encoding="utf-8"))
    assert {name: one["exit"] for name, one in seen.items() if "exit" in one} == {
        name: one["exit"] for name, one in known.items() if "exit" in one
    }
    assert {name: listed(one) for name, one in seen.items()} == {name: listed(one) for name, one in known.items()}


def listed(entry: Any) -> list[str]:
    """Return the keys or names of an entry of the contract."""
    found: list[str] = entry["keys"] if "exit" in entry else entry
    return found
