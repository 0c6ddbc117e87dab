"""Any file of a home, a run, a snapshot or a model removed, cut, flipped, linked or replaced, any command: one message
and a documented exit code, never a traceback, and never another run in silence."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command import hivetune
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train.supervise.scripted import make_run, supervise

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, read_json, sha256_file, write_json, write_manifest
from hivetune.config import RunConfig
from hivetune.data.identity import settings_of
from hivetune.errors import UsageError
from hivetune.judge.evaluate import SideAnswers, comparison_document
from hivetune.run.choices import Choices
from hivetune.run.folder import write_record, write_resolved
from hivetune.train.open import load_run
from hivetune.train.plan.steps import Amendment, append_amendment

pytestmark = pytest.mark.slow

DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 75}
NAME = "mine-abc"


def make_home(home: Path) -> Path:
    """A home with a finished run that was evaluated, its snapshot and its model."""
    folder = home / "all"
    config = make_run(folder, [])
    supervise(folder, config).check()
    run = folder / "run"
    (run / "adapter_config.json").write_text("{}")
    (run / "adapter_model.safetensors").write_bytes(bytes(100))
    (run / "child.log").write_text("a line of the log\n")
    append_amendment(run, Amendment(20, (3,), "rows.jsonl:4: its loss is not finite"))
    write_resolved(run, config, Choices(device="cpu"))
    write_json(folder / "model/hivetune.json", {"schema": 1, "name": "none", "kind": "folder", "source": "none"})
    write_manifest(folder / "model")
    write_record(run, record(folder, config))
    base, tuned = SideAnswers("base", "base"), SideAnswers("run", "run")
    evaluation = comparison_document([], [base, tuned], [], {"model": str(folder / "model")})
    write_json(run / "eval.json", {**evaluation, "adapter_sha256": sha256_file(run / "adapter_model.safetensors")})
    with open_database(home / "hive.db") as database:
        database.execute("INSERT INTO runs VALUES (?, 'mine', 5.0, 'h')", (str(run),))
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    return run


def record(folder: Path, config: RunConfig) -> dict[str, object]:
    rows = {"rows_in": 96, "trained": 96, "rejected": {}}
    result = {"run": str(folder / "run"), "status": "done", "steps": 24, "rows": rows, "quarantined": [], "restarts": 0}
    result |= dict.fromkeys(("loss_first", "loss_last", "tokens_per_second", "adapter_step"), 1.0)
    result |= {"peak_memory_bytes": 5, "train_seconds": 1.0, "storage_problem": "", "arithmetic_changes": []}
    result |= {"dtype": "float32", "device": "cpu", "path": "fast", "kernels": "native"}
    snapshot = read_json(folder / "snapshot" / MANIFEST)["hash"]
    identity = {
        "settings": settings_of(config),
        "snapshot": snapshot,
        "model": sha256_file(folder / "model" / MANIFEST),
    }
    paths = {"model": str(folder / "model"), "snapshot": str(folder / "snapshot")}
    known = {"schema": 1, "name": "mine", "created": 5.0, "status": "done"}
    return {**known, "identity": identity, "result": result, **paths}


def flip(path: Path, where: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[where % len(content)] ^= 1 << bit
    path.write_bytes(content)


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


OTHER_JSON = ["[]", "{}", "null", '{"schema": 1}', "[" * 100_000, '{"event": "step"}\n', "1e999"]
Damage = Callable[[Path, int, int], object]
DAMAGES: dict[str, Damage] = {
    "remove": lambda path, where, bit: path.unlink(),
    "cut": lambda path, where, bit: os.truncate(path, where % max(1, path.stat().st_size)),
    "flip": flip,
    "flip another": flip,
    "garble": lambda path, where, bit: path.write_bytes(os.urandom(where % 5000)),
    "other json": lambda path, where, bit: path.write_text(OTHER_JSON[where % 7]),
    "close to its owner": lambda path, where, bit: path.chmod(0),  # root reads it all the same
    "link to nothing": lambda path, where, bit: instead(path, lambda new: new.symlink_to("/nowhere/at/all")),
    "link to another": lambda path, where, bit: instead(path, lambda new: new.symlink_to("/etc/hostname")),
    "link to itself": lambda path, where, bit: instead(path, lambda new: new.symlink_to(new)),
    "folder instead": lambda path, where, bit: instead(path, Path.mkdir),
    "pipe instead": lambda path, where, bit: instead(path, os.mkfifo),
}
COMMANDS = [
    line.split()
    for line in (
        "runs",
        "runs --json",
        "show RUN",
        "show RUN --json",
        "show RUN --follow",
        "show RUN --log",
        "stop RUN",
        "train RUN",
        "eval RUN --set gate.loss_gain=0",
        "export RUN --to adapter --no-check",
        "releases",
        "check store",
    )
]
# A file of the home, and what is done to it where.
DAMAGED: dict[str, st.SearchStrategy[int] | st.SearchStrategy[str]] = {
    "file": st.integers(0, 1000),
    "damage": st.sampled_from(sorted(DAMAGES)),
    "where": st.integers(0, 1 << 20),
    "bit": st.integers(0, 7),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a whole home, where its copy lies when a test spoils it: paths in it are absolute)."""
    place = tmp_path_factory.mktemp("place") / "home"
    make_home(place)
    kept = place.with_name("kept")
    shutil.copytree(place, kept)
    return kept, place


def files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def spoil(home: Path, names: list[str], damage: str, *, file: int, where: int, bit: int) -> None:
    DAMAGES[damage](home / names[file % len(names)], where, bit)


def fresh(whole: tuple[Path, Path]) -> Path:
    kept, place = whole
    shutil.rmtree(place)
    shutil.copytree(kept, place)
    return place


def raise_it(error: Exception) -> None:
    """Instead of the message that the program makes of a bug of its own."""
    raise error


def ask(home: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> "subprocess.CompletedProcess[str]":
    """Run the command in a home; an exception that the program does not report in words is raised."""
    monkeypatch.setattr("hivetune.cli.output.report_bug", raise_it)
    return hivetune(*(word.replace("RUN", str(home / "all/run")) for word in command), HIVETUNE_HOME=str(home))


def test_the_whole_home_is_read_without_a_complaint(whole: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    home = fresh(whole)
    asked = {" ".join(command): ask(home, command, monkeypatch) for command in COMMANDS}
    codes = {name: done.returncode for name, done in asked.items()}
    assert codes == {name: 0 for name in codes} | {"eval RUN --set gate.loss_gain=0": 6, "check store": 3}, asked


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**DAMAGED, command=st.sampled_from(COMMANDS))
def test_no_damage_is_a_traceback(
    whole: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, damage: str, command: list[str], **place: int
) -> None:
    home = fresh(whole)
    spoil(home, files(home), damage, **place)
    assert ask(home, command, monkeypatch).returncode in DOCUMENTED


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**DAMAGED)
def test_no_damage_makes_another_run_in_silence(whole: tuple[Path, Path], damage: str, **place: int) -> None:
    """Settings, plan and amendments are what they were, or the run is refused."""
    home = fresh(whole)
    before = load_run(home / "all/run")
    spoil(home, [name for name in files(home) if name.startswith("all/run/")], damage, **place)
    try:
        after = load_run(home / "all/run")
    except (UsageError, OSError):
        return
    assert after.config == before.config
    assert (after.model, after.snapshot.folder) == (before.model, before.snapshot.folder)
    # Amendments that were cut off whole look like those of a writer that died; the rows fail and are taken out again.
    kept = after.plan.amendments
    assert kept == before.plan.amendments[: len(kept)]
    assert replace(after.plan, amendments=()) == replace(before.plan, amendments=())
    assert after.record["result"] == before.record["result"]


@pytest.mark.parametrize("damage", ["remove", "cut", "garble", "other json"])
@pytest.mark.parametrize("name", ["run.json", "plan.json", "events.jsonl"])
def test_a_list_of_runs_does_not_die_of_one(
    whole: tuple[Path, Path], damage: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fresh(whole)
    shutil.copytree(home / "all/run", home / "other")
    with open_database(home / "hive.db") as database:
        database.execute("INSERT INTO runs VALUES (?, 'other', 6.0, 'h')", (str(home / "other"),))
    database.close()
    DAMAGES[damage](home / "all/run" / name, 77, 3)
    done = ask(home, ["runs", "--json"], monkeypatch)
    listed = {entry["run"]: entry for entry in json.loads(done.stdout)["runs"]}
    assert done.returncode == 0 and listed[str(home / "other")]["state"] == "done"
