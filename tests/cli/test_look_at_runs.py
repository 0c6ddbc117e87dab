"""The commands that look after runs, on folders as a supervisor leaves them, and on a full disk."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from command import hivetune
from dashboard.shown import supervisor
from small_disk import fill

from hivetune.base.database import open_database
from hivetune.base.disk import lock, path_to_store, write_json, write_manifest
from hivetune.base.journal import Journal
from hivetune.cli.train import start_detached
from hivetune.config import parse_config
from hivetune.errors import UsageError
from hivetune.release.export import export_run
from hivetune.run.choices import Choices
from hivetune.run.folder import write_resolved
from hivetune.run.status import ask_to_stop, find_run, lock_run
from hivetune.train.open import load_run

CARD = {"memory_bytes": 24 << 30, "used_bytes": 23 << 30, "temperature_c": 104.0, "watts": 300.0, "hot": True}
SAMPLE = {"available_bytes": 3 << 30, "disk_free_bytes": 9 << 30, "resident_bytes": 2 << 30, "cards": [CARD]}


def make(folder: Path, name: str = "mine-abc", ended: str | None = "stopped") -> Path:
    run = folder / name
    (run / "checkpoints/000020").mkdir(parents=True)
    (run / "checkpoints/000020/state.safetensors").write_bytes(bytes(300_000))
    write_json(run / "run.json", {"schema": 1, "name": "mine", "created": 5.0, "status": ended or "new"})
    write_json(run / "plan.json", {"schema": 1, "steps": 20})
    with Journal(run / "metrics.jsonl") as metrics:
        for step in (1, 2):
            metrics.append("step", step=step, loss=3.0 - step / 2, tokens=100, seconds=0.5)
        metrics.append("validation", step=2, loss=2.5)
        metrics.append("save_failed", step=1, seconds=1.0, error="[Errno 28] No space left on device")
    with Journal(run / "events.jsonl") as events:
        events.append("supervisor_started")
        events.append("sample", **SAMPLE)
        events.append("failure", step=1, words="the card hung and was reset", fault="device-hang")
        events.append("action", action="again", why="once may be chance")
        events.append("disk_wait", reclaimed_bytes=0, free_bytes=0)
        events.append("disk_ready", free_bytes=1 << 20)
        if ended:
            events.append("supervisor_ended", status=ended, steps=2, restarts=1, why="")
    write_manifest(run)
    with closing(open_database()) as database:
        database.execute("INSERT INTO runs VALUES (?, 'mine', 5.0, 'h')", (path_to_store(run),))
    return run


def test_status_names_a_run_as_show_takes_it(tmp_path: Path) -> None:
    """It named the run by its config, as three others, and only its notes by what `show` takes."""
    runs = [make(tmp_path, "mine-abc"), make(tmp_path, "mine-def"), make(tmp_path / "other", "mine-def")]
    told = hivetune("status", "--json").stdout
    assert {run["name"] for run in json.loads(told)["recent"]} == {"mine-abc", *map(str, runs[1:])}
    for run in json.loads(told)["recent"]:
        assert json.loads(hivetune("show", run["name"], "--json").stdout)["run"] == run["run"]


def test_all_runs_and_one_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    config = parse_config({"model": "smollm2-135m", "data": {"path": "rows.jsonl"}})
    write_resolved(run, config, Choices(device="cpu", dtype="float32", threads=2))
    (listed,) = json.loads(hivetune("runs", "--json").stdout)["runs"]
    assert (listed["run"], listed["state"], listed["step"], listed["steps"]) == (str(run), "stopped", 2, 20)
    shown = json.loads(hivetune("show", "mine", "--json").stdout)
    assert (shown["loss"], shown["validation_loss"], shown["tokens_per_second"]) == (2.0, 2.5, 200.0)
    assert shown["choices"] == {"device": "cpu", "dtype": "float32", "threads": 2}
    told = " ".join(hivetune("show", "mine").stdout.split())
    for words in ("the card hung", "computed: dtype float32, device cpu", "available 3.2 GB, resident 2.1 GB",
                  "used 24.7 GB", "temperature c 104", "state: stopped step: 2 steps: 20",
                  "its disk was full once; 1 checkpoint could not be written: [Errno 28]"):  # fmt: skip
        assert words in told, told
    (run / "child.log").write_text("".join(f"line {i}\n" for i in range(100)))
    logs = json.loads(hivetune("show", str(run), "--log", "--json").stdout)["logs"]["child.log"]
    assert (len(logs), logs[-1]) == (50, "line 99")


def test_a_run_whose_supervisor_vanished_says_how_to_go_on(tmp_path: Path) -> None:
    run = make(tmp_path, ended=None)
    assert f"continue it: hivetune train {run.name}" in hivetune("show", str(run)).stdout
    followed = hivetune("show", str(run), "--follow")
    assert followed.returncode == 0 and "interrupted, step 2 of 20, loss 2.000, validation 2.500" in followed.stdout
    (line,) = hivetune("show", str(run), "--follow", "--json").stdout.splitlines()
    assert json.loads(line)["step"] == 2


@pytest.mark.slow
def test_follow_prints_what_happens_until_the_run_ends(tmp_path: Path) -> None:
    run = make(tmp_path, ended=None)
    with lock_run(run):
        command = [sys.executable, "-m", "hivetune", "show", str(run), "--follow"]
        following = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        assert following.stdout is not None
        assert "running, step 2 of 20, loss 2.000" in following.stdout.readline()
        with Journal(run / "events.jsonl") as events:
            events.append("failure", step=2, words="the card hung again", fault="device-hang")
        with Journal(run / "metrics.jsonl") as metrics:
            metrics.append("step", step=3, loss=1.5, tokens=100, seconds=0.5)
        told = [following.stdout.readline(), following.stdout.readline()]
        assert "fault in step 2: the card hung again\n" in told, told
        assert any("step 3 of 20, loss 1.500" in line and "available 3.2 GB" in line for line in told), told
    assert "interrupted" in following.communicate(timeout=30)[0] and following.returncode == 0


def test_runs_are_found_by_folder_name_its_beginning_and_last(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no run 'last'"):
        find_run("last")
    first, second = make(tmp_path), make(tmp_path, "mine-abd")
    write_json(second / "run.json", {**json.loads((second / "run.json").read_text()), "created": 9.0})
    assert find_run(str(first)) == first and find_run("mine-abd") == second == find_run("last")
    make(own_home / "cycles/helpdesk/0a1b", "run")
    assert find_run("last") == second, "a cycle in the background is nobody's last run"
    with pytest.raises(UsageError, match="'mine-' could mean 2 runs") as caught:
        find_run("mine-")
    assert first.name in caught.value.hint and second.name in caught.value.hint
    with pytest.raises(UsageError, match="no run 'other'"):
        find_run("other")
    with pytest.raises(UsageError, match="is not a run folder"):
        find_run(str(tmp_path))
    (tmp_path / "elsewhere" / first.name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_run(first.name) == first, "a file of that name does not hide it"


def test_only_what_was_named_and_is_not_in_use_is_deleted(tmp_path: Path) -> None:
    """The `output` of a config may lie in the folder of another run."""
    outer, inner = make(tmp_path, "outer"), make(tmp_path / "outer", "01")
    refused = hivetune("rm", str(outer), "--yes")
    assert refused.returncode == 2 and f"{outer} contains other runs: {inner}" in refused.stderr
    assert f"hivetune rm {outer} {inner}" in refused.stderr and inner.exists()
    free, used = make(tmp_path, "a"), make(tmp_path, "b")
    with lock(used):
        refused = hivetune("rm", str(free), str(used), "--yes")
    assert refused.returncode == 75 and free.exists() and used.exists()
    assert "give --yes" in hivetune("rm", str(free)).stderr
    assert hivetune("rm", str(outer), str(inner), "--yes").returncode == 0
    assert not outer.exists() and not inner.exists()


def test_a_run_is_stopped_without_its_settings_but_not_in_another_container(tmp_path: Path) -> None:
    run = make(tmp_path, ended=None)
    with supervisor(run) as process:
        assert hivetune("stop", str(run)).returncode == 0
        assert process.wait(30) == -signal.SIGTERM
    with lock(run):
        (run / ".lock").write_text(f"{os.getpid()} a-container\n")  # its number is that of another process here
        with pytest.raises(UsageError, match="another container or machine"):
            ask_to_stop(run)


@pytest.mark.parametrize("name", ["checkpoints", ".lock", "supervisor.log", "child.log"])
def test_a_planted_run_folder_leads_nobody_out_of_it(name: str, tmp_path: Path) -> None:
    run, elsewhere = make(tmp_path), tmp_path / "elsewhere"
    (elsewhere / "000001").mkdir(parents=True)
    (elsewhere / "000001" / "precious").write_text("precious")
    if name == "checkpoints":
        (run / name).rename(tmp_path / "away")
    (run / name).symlink_to(elsewhere if name == "checkpoints" else elsewhere / "000001" / "precious")
    doings: list[Callable[[], object]] = [
        lambda: load_run(run),  # what train, stop and eval begin with
        lambda: export_run(run, "gguf"),
        lambda: start_detached(run),
    ]
    for doing in doings:
        with pytest.raises(UsageError, match=f"{run / name} is a symbolic link"):
            doing()
    assert [path.name for path in elsewhere.iterdir()] == ["000001"]
    assert (elsewhere / "000001" / "precious").read_text() == "precious"


@pytest.fixture
def full_home(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the runs `finished` and `other`, and no byte left."""
    home = small_disk / "home"
    home.mkdir()
    monkeypatch.setenv("HIVETUNE_HOME", str(home))
    make(home / "runs", "finished", "done")
    make(home / "runs", "other")
    fill(small_disk)
    return home


def test_on_a_full_disk_looking_works_and_space_is_freed(full_home: Path) -> None:
    looks = [hivetune(*words) for words in (["runs"], ["status"], ["show", "finished"], ["rm", "--unused", "--json"])]
    assert [look.returncode for look in looks] == [0] * 4, looks
    assert "".join(look.stdout for look in looks).count("its disk was full once") == 5  # runs and status tell of both
    assert hivetune("rm", "--unused", "--yes").returncode == 0
    assert not (full_home / "runs/finished/checkpoints").exists()
    manifest = json.loads((full_home / "runs/finished/manifest.json").read_text())
    assert not [name for name in manifest["files"] if name.startswith("checkpoints")]
    fill(full_home.parent)
    assert hivetune("rm", "other", "--yes").returncode == 0
    assert not (full_home / "runs/other").exists()
    with closing(open_database()) as database:
        assert [name for (name,) in database.execute("SELECT path FROM runs")] == ["runs/finished"]
