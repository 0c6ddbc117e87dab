"""What a run rests on, and what it made, is checked by whoever uses it: settings, model, snapshot, adapter, exports."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from train.worker.runs import learnable_rows, make_run

from hivetune.base.database import open_database
from hivetune.base.disk import home, lock, path_to_store, write_manifest
from hivetune.base.journal import Journal
from hivetune.data.identity import identity_of
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import Busy, HivetuneError, UsageError
from hivetune.judge.evaluate import evaluate_run, judge_run
from hivetune.llama.backend import ServerSettings, check_files
from hivetune.release.export import export_run
from hivetune.run.folder import EVENTS, METRICS, read_record, read_resolved, write_record, write_resolved
from hivetune.run.status import run_folders
from hivetune.train.open import load_run, with_workers
from hivetune.walk import register_run

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run, its model being a file of zeros: nothing here is computed."""
    make_run(tmp_path, learnable_rows(20))
    model, folder = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(64))
    (model / "hivetune.json").write_text("{}")
    write_manifest(model)
    snapshot = open_snapshot(tmp_path / "snapshot")
    identity = identity_of(read_resolved(folder)[0], snapshot, model)
    known = {"schema": 1, "name": "demo", "created": 1.0, "status": "done", "model": str(model)}
    write_record(folder, {**known, "snapshot": str(snapshot.folder), "identity": identity})
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(64))
    write_manifest(folder, {"kind": "run"})
    return folder


def test_a_run_goes_on_with_the_workers_that_are_asked_for_now(run: Path) -> None:
    """A cluster that does not answer must not be the run's for ever; a run that is done stays what it is."""
    config, choices = read_resolved(run)
    began = config.model_copy(update={"workers": "127.0.0.1:9"})
    write_resolved(run, began, choices)
    record = read_record(run)
    identity = identity_of(began, open_snapshot(Path(record["snapshot"])), Path(record["model"]))
    write_record(run, {**record, "identity": identity})
    assert with_workers(load_run(run), 3).config.workers == "127.0.0.1:9"
    write_record(run, {**record, "identity": identity, "status": "interrupted"})
    assert with_workers(load_run(run), 3).config.workers == 3
    assert load_run(run).config.workers == 3 and read_resolved(run)[1] == choices
    with lock(run), pytest.raises(Busy):
        with_workers(load_run(run), 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


USES: dict[str, Callable[[Path], Any]] = {
    "eval": lambda run: evaluate_run(load_run(run)),
    "gate": lambda run: judge_run(load_run(run)),
    "export": lambda run: export_run(run, "adapter"),
}


def test_the_adapter_of_a_stop_is_not_judged_as_that_of_the_steps_that_came_after_it(run: Path) -> None:
    """The run was stopped after step 1, resumed, and killed after step 2."""
    write_record(run, {**read_record(run), "status": "stopped", "result": {"steps": 1}})
    with Journal(run / METRICS) as metrics, Journal(run / EVENTS) as events:
        events.append("supervisor_started", pid=1)
        events.append("supervisor_ended", status="stopped", steps=1, restarts=0, why="")
        for step in (1, 2):
            metrics.append("step", step=step, loss=1.0, seconds=1.0, tokens=10)
        events.append("supervisor_started", pid=2)
    with pytest.raises(UsageError, match="interrupted at step 2, but its adapter was written at step 1") as refused:
        evaluate_run(load_run(run))
    assert "hivetune train" in refused.value.hint
    with lock(run), pytest.raises(UsageError, match="runs at step 2, but its adapter was written at") as refused:
        register_run(run, "helpdesk")
    assert "hivetune stop" in refused.value.hint


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_home_that_was_moved_or_copied_uses_its_own_model_and_snapshot(
    how: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy went on in the original's folders as long as they were there."""
    record = read_record(run)
    for key, folder in (("model", "models"), ("snapshot", "snapshots")):
        place = home() / folder / "its"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(record[key], place)
        record[key] = str(place)
    mine = home() / "runs" / "mine"
    shutil.copytree(run, mine)
    write_record(mine, record)
    with closing(open_database()) as database:
        row = (path_to_store(mine), "mine", 1.0, "h")
        database.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", row)
    other = tmp_path / "other"
    (shutil.move if how == "moved" else shutil.copytree)(home(), other)
    monkeypatch.setenv("HIVETUNE_HOME", str(other))
    assert [path for path in run_folders() if path.name == "mine"] == [home() / "runs" / "mine"]
    found = load_run(home() / "runs" / "mine")
    assert (found.model, found.snapshot.folder) == (home() / "models" / "its", home() / "snapshots" / "its")


def test_a_run_that_can_only_be_read_is_not_evaluated_in_vain(run: Path, small_disk: Path) -> None:
    shutil.copytree(run, small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        evaluate_run(load_run(small_disk / "run"))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_flipped_bit_in_the_adapter_of_a_finished_run_ships_nowhere(name: str, use: str, run: Path) -> None:
    if use == "gate":  # of the adapter as it is: its verdict would stand
        hashed = load_run(run)
        (run / "eval.json").write_text(json.dumps({"adapter_sha256": "0" * 64, "model": hashed.config.model}))
    flip(run / name)
    with pytest.raises(HivetuneError, match=f"was changed after training: {name}: its hash"):
        USES[use](run)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("path", ["model/model.safetensors", "snapshot/trained.u8", "snapshot/rows.sqlite"])
def test_a_damaged_model_or_snapshot_is_not_used(path: str, use: str, run: Path) -> None:
    flip(run.parent / path)
    if use == "export" and "snapshot" in path:
        assert export_run(run, "adapter").made  # the rows are not needed for it
        return
    with pytest.raises(UsageError, match="damaged") as error:
        USES[use](run)
    assert Path(path).name in error.value.message and error.value.hint


@pytest.mark.parametrize(
    ("key", "value"), [("learning_rate", 1e-1), ("dtype", "bfloat16"), ("lora.alpha", 16.0), ("batch_size", 4)]
)
def test_a_setting_that_was_changed_behind_the_runs_back_is_named(key: str, value: object, run: Path) -> None:
    path = run / "config.resolved.yaml"
    tree = yaml.safe_load(path.read_text())
    *sections, last = key.split(".")
    place = tree["config"]
    for section in sections:
        place = place[section]
    place[last] = value
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(UsageError, match=rf"was changed after it began: {key}: .* there, {value!r} here"):
        load_run(run)


def test_another_model_or_data_in_the_same_place_is_named(run: Path) -> None:
    model = run.parent / "model"
    (model / "model.safetensors").write_bytes(b"\1" * 64)
    write_manifest(model)
    with pytest.raises(UsageError, match="was changed after it began: another model"):
        load_run(run)


def test_a_damaged_export_is_made_again_and_never_served(run: Path) -> None:
    exported = export_run(run, "adapter")
    assert exported.made and not export_run(run, "adapter").made
    weights = exported.folder / "adapter_model.safetensors"
    flip(weights)
    assert export_run(run, "adapter").made
    assert weights.read_bytes() == bytes(64)


@pytest.mark.parametrize("linked", [False, True])
def test_a_damaged_gguf_file_is_not_served(linked: bool, tmp_path: Path) -> None:
    folder = tmp_path / "gguf-f16"
    folder.mkdir()
    path = folder / "demo-f16.gguf"
    path.write_bytes(b"GGUF" + os.urandom(100))
    write_manifest(folder)
    flip(path)
    if linked:
        path = tmp_path / "link.gguf"
        path.symlink_to(folder / "demo-f16.gguf")
    with pytest.raises(UsageError, match="it is damaged"):
        check_files(path, ServerSettings())
