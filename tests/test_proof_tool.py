"""tools/proof.py: a result is stale when the code that it ran has changed, and not before."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import proof as tool
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A repository with one room, another room and a result of the proof of the first."""
    for name in ("src/hivetune/data/a.py", "src/hivetune/serve/b.py", "tests/data/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    (tmp_path / "docs" / "proof").mkdir(parents=True)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    yield tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a change")


def test_a_result_is_stale_only_when_its_code_changed(clone: Path) -> None:
    proof = tool.Proof("a claim", ("tests/data",), ("data",))

    def state() -> str:
        return tool.state(clone, "rows", proof).partition(":")[0]

    assert state() == "never run"
    code = tool.code_hash(clone, proof.paths())
    result = {"code": code, "date": "2026-11-28", "commit": "abc1234"}
    (clone / "docs" / "proof" / "rows.json").write_text(json.dumps(result))
    commit(clone)  # the result itself
    assert state() == "up to date"
    (clone / "src/hivetune/serve/b.py").write_text("2\n")
    commit(clone)
    assert state() == "up to date"
    (clone / "src/hivetune/data/a.py").write_text("2\n")
    assert tool.changed_files(clone, proof.paths()) == [" M src/hivetune/data/a.py"]
    commit(clone)
    assert state() == "stale"


def test_every_test_marked_proof_belongs_to_a_proof() -> None:
    selected = [ROOT / path for proof in tool.PROOFS.values() for path in proof.tests if not path.startswith("--")]
    assert [path for path in selected if not path.exists()] == []
    rooms = {room for proof in tool.PROOFS.values() for room in proof.rooms}
    assert [room for room in rooms if not (ROOT / "src" / "hivetune" / room).exists()] == []
    mark = re.compile(r"^(?:@pytest\.mark\.proof|pytestmark = pytest\.mark\.proof)", re.MULTILINE)
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if mark.search(path.read_text(encoding="utf-8"))]
    assert [path for path in marked if not any(path.is_relative_to(one) for one in selected)] == []
