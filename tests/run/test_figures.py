"""What a run folder says of its settings, and the figures of a run in each tool, as the tool itself reads them.
TensorBoard's: train/worker/test_train.py."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from hivetune.base.disk import write_json
from hivetune.base.journal import Journal
from hivetune.config import parse_config
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.run.figures import figures_of, missing_tools, point_of, report
from hivetune.run.folder import CONFIG, read_resolved, write_resolved

# What each tool needs, as pyproject.toml's extras name it. Installed for the proof alone: together 90 packages.
NEEDS = {"mlflow": ["mlflow-skinny", "sqlalchemy", "alembic"], "trackio": ["trackio"], "wandb": ["wandb"]}
READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("hivetune")
[run] = client.search_runs([experiment.experiment_id])
print(json.dumps({
    "status": run.info.status, "model": run.data.params["model"],
    **{kind: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
       for kind, name in (("step", "train/loss"), ("validation", "validation/loss"))},
}))
"""
READ_TRACKIO = """
import json, os, sys
os.environ["TRACKIO_DIR"] = sys.argv[1]
import trackio
[run] = trackio.Api().runs("hivetune")
read = lambda name: trackio.SQLiteStorage.get_metric_values("hivetune", run.name, name, run_id=run.id)
print(json.dumps({kind: [(row["step"], row["value"]) for row in read(name)]
                  for kind, name in (("step", "train/loss"), ("validation", "validation/loss"))}))
"""
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
[path] = Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")
data, place, part, found = path.read_bytes(), 7, b"", {"step": [], "validation": []}
while place + 7 <= len(data):  # LevelDB's log: blocks of 32 KiB; a record is whole (1) or in parts (2, 3, 4)
    if (left := 32768 - place % 32768) < 7:
        place += left
        continue
    length, kind = struct.unpack_from("<HB", data, place + 4)
    part += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):
        record, part = Record.FromString(part), b""
        items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for name, key in (("train/loss", "step"), ("validation/loss", "validation")):
            if name in items:
                found[key].append((record.history.step.num, items[name]))
print(json.dumps(found))
"""
SETTINGS = parse_config({"model": "tiny", "data": {"path": "rows.jsonl"}, "lora": {"r": 4}}, "test")
READERS = {"mlflow": READ_MLFLOW, "trackio": READ_TRACKIO, "wandb": READ_WANDB}


@pytest.fixture(scope="session")
def python_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the interpreter of an environment that has a tool besides what this one has."""

    def make(tool: str) -> str:
        kept = os.environ.get("HIVETUNE_PROOF_FOLDER")
        folder = (Path(kept) if kept else tmp_path_factory.mktemp("tools")) / tool
        python = folder / "bin" / "python"
        if not (folder / "ready").exists():
            venv.create(folder, with_pip=True, clear=True)
            own = Path(pytest.__file__).parent.parent
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            beside = folder / "lib" / version / "site-packages" / "beside.pth"
            beside.write_text(f"import site; site.addsitedir({str(own)!r})\n")
            install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *NEEDS[tool]]
            subprocess.run(install, check=True, stderr=subprocess.DEVNULL)
            (folder / "ready").touch()
        return str(python)

    return make


def make_run(folder: Path, steps: int = 25) -> Path:
    """Make a run folder without training, with a validation at each tenth step."""
    run = folder / "mine-abc"
    run.mkdir(parents=True)
    write_json(run / "run.json", {"schema": 1, "name": "mine", "created": 1_700_000_000.25, "status": "done"})
    cycle = {"name": "desk", "notify": ["curl", "https://hooks.example.org/secret"]}
    config = parse_config({"model": "smollm2-135m", "data": {"path": "rows.jsonl"}, "cycle": cycle})
    write_resolved(run, config, Choices(device="cpu", dtype="float32"))
    with Journal(run / "metrics.jsonl") as metrics:
        for step in range(1, steps + 1):
            known = {"grad_norm": 1.0 + step / 7, "lr": 1e-4, "tokens": 320, "seconds": 0.25}
            metrics.append("step", step=step, loss=3.0 - step / 900, **known)
            if step % 10 == 0:
                metrics.append("validation", step=step, loss=2.5 - step / 900, seconds=1.0)
    return run


def losses(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the losses of the journal, read without the code under test."""
    found: dict[str, list[tuple[int, float]]] = {"step": [], "validation": []}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] in found:
            found[entry["event"]].append((entry["step"], entry["loss"]))
    return found


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    choices = Choices(device="cuda:1", dtype="bfloat16", threads=3, kernels="torch", halvings=0)
    write_resolved(tmp_path, SETTINGS, choices)
    assert read_resolved(tmp_path) == (SETTINGS, choices)


def test_whom_a_cycle_tells_is_not_written(tmp_path: Path) -> None:
    """A run folder is copied into releases, and a command may name an address at which anybody can post."""
    cycle = {"name": "demo", "notify": ["curl", "https://hooks.example.org/whisper"]}
    settings = parse_config({**SETTINGS.model_dump(mode="json"), "cycle": cycle}, "test")
    write_resolved(tmp_path, settings, NO_CHOICES)
    text = (tmp_path / CONFIG).read_text()
    assert "whisper" not in text and "example.org" not in text
    assert read_resolved(tmp_path)[0].cycle.name == "demo"


def test_changes_win_and_leave_the_rest() -> None:
    settled = Choices(device="cpu", dtype="bfloat16", halvings=1)
    assert settled.updated(Choices(dtype="float32", halvings=0)) == Choices(device="cpu", dtype="float32", halvings=0)
    assert settled.updated(NO_CHOICES) == settled


def test_a_step_that_lost_all_its_rows_and_other_events_are_no_points() -> None:
    assert point_of({"event": "step", "step": 1, "time": 1.0, "loss": None}) is None
    assert point_of({"event": "saved", "step": 1, "time": 1.0}) is None
    point = point_of({"event": "step", "step": 2, "time": 1.0, "loss": 2.0, "tokens": 100, "seconds": 0.5})
    assert point is not None
    assert point.values == {"train/loss": 2.0, "train/tokens_per_second": 200.0}


def test_settings_and_verdict_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    metrics = [{"name": "loss", "gain": 0.125}, {"name": "success", "gain": None}]
    write_json(run / "eval.json", {"schema": 1, "verdict": "deploy", "metrics": metrics})
    figures = figures_of(run)
    assert figures.settings["model"] == "smollm2-135m"
    assert figures.settings["cycle.name"] == "desk" and "secret" not in str(figures)
    assert figures.outcome == {"status": "done", "verdict": "deploy", "verdict.loss": "+0.125"}
    assert len(figures.points) == 27


def test_a_tool_that_is_missing_or_fails_is_told_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [tool for tool in NEEDS if any("not installed" in text for text in missing_tools([tool]))]
    assert report(make_run(tmp_path), missing) == []
    (tmp_path / "trackio.py").write_text("raise OSError('no room')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [problem] = report(make_run(tmp_path / "again"), ["trackio", "tensorboard"])
    assert problem == "the run was not reported to trackio: OSError: no room"


@pytest.mark.proof
@pytest.mark.parametrize("target", sorted(NEEDS))
def test_each_tool_holds_the_run_once_however_often_it_is_sent(
    target: str, tmp_path: Path, python_with: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, place = make_run(tmp_path), tmp_path / "place"
    for variable in ("TRACKIO_DIR", "WANDB_DIR"):
        monkeypatch.setenv(variable, str(place))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
    place.mkdir()
    python = python_with(target)
    for _ in range(2):
        subprocess.run([python, "-m", "hivetune.run.figures", str(run), target], check=True)
    where = f"sqlite:///{place}/mlflow.db" if target == "mlflow" else str(place)
    shown = subprocess.run([python, "-c", READERS[target], where], check=True, capture_output=True, text=True).stdout
    read = json.loads(shown.splitlines()[-1])
    for kind, points in losses(run).items():
        assert [tuple(point) for point in read[kind]] == [(step, pytest.approx(loss)) for step, loss in points]
