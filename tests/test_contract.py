"""What scripts rely on: the keys of each command's `--json`, its exit code, and the files of a home.

`contract/home-VERSION.tar.xz` was written by that version (`contract/make_home.py`) and is opened by this one.
`contract/contract.json` holds what the commands said of it then. A key may be added, none may vanish. To accept a
wanted change, run this test with HIVETUNE_WRITE_CONTRACT=1 and say in CHANGELOG.md what users have to change.
"""

import fcntl
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import hivetune

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "contract"
CONTRACT = HERE / "contract.json"
HOMES = sorted(HERE.glob("home-*.tar.xz"))
PLACE = Path(tempfile.gettempdir()) / "hivetune-contract"  # where its absolute paths lead
COMMANDS = (
    "status",
    "runs",
    "show plain",
    "show stopped",
    "logs plain",
    "data check rows.jsonl",
    "plan plain.yaml",
    "train plain.yaml",
    "gate plain",
    "registry",
    "why demo@1",
    "frozen demo",
    "clients",
    "cycle status",
    "cycle cycle.yaml --dry-run",
    "prune",
    "config",
    "export plain --to gguf-adapter",
    "register plain --as again",
    "promote again@1 --force --reason contract",
    "rollback demo",
    "chat demo --prompt hi --max-tokens 2",
    "data forget --user u3",
    "resume stopped",
    "train missing.yaml",
    "show nothing-of-this-name",
    "gate stopped",
)
# Keys below these are data: reasons, names of measures, settings.
DATA = {"rejected", "set_aside", "quarantined", "settings", "defaults", "properties", "$defs", "by", "layouts"}


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


@pytest.fixture(scope="module", params=HOMES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    with open(PLACE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another clone's tests use the same place
        shutil.rmtree(PLACE, ignore_errors=True)
        with tarfile.open(request.param) as file:
            file.extractall(PLACE.parent, filter="data")
        yield PLACE
        shutil.rmtree(PLACE)


def call(place: Path, command: str) -> tuple[int, Any]:
    """Exit code and the documents of `hivetune COMMAND --json`."""
    done = hivetune(*command.split(), "--json", cwd=place, HIVETUNE_HOME=str(place / "home"))
    try:
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]
    except json.JSONDecodeError:
        pytest.fail(f"{command}: {done.stdout}{done.stderr}")


def test_a_home_of_an_earlier_version_answers_as_it_did(place: Path) -> None:
    seen: dict[str, Any] = {}
    for command in COMMANDS:
        code, documents = call(place, command)
        seen[command] = {"exit": code, "keys": sorted(set().union(*map(shape, documents)))}
    seen["files of a run"] = files_of(place / "plain")
    seen["files of a release"] = files_of(place / "home" / "releases" / "again" / "1")
    seen["files of the home"] = sorted({name.partition("/")[0] for name in files_of(place / "home")})
    if os.environ.get("HIVETUNE_WRITE_CONTRACT") == "1":
        CONTRACT.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    known = json.loads(CONTRACT.read_text(encoding="utf-8"))
    assert {name: one["exit"] for name, one in seen.items() if "exit" in one} == {
        name: one["exit"] for name, one in known.items() if "exit" in one
    }
    missing = {
        name: sorted(
            set(one["keys"] if "exit" in one else one) - set(seen[name]["keys"] if "exit" in one else seen[name])
        )
        for name, one in known.items()
    }
    assert not {name: keys for name, keys in missing.items() if keys}
