"""Exporters that are killed while a run goes on and its worker goes back: each tool holds the journal's points, once,
as the tool itself reads them."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from journals import Points, float32, make_run, make_steps, points_in, take_back
from tensorboard_reader import read_by_tensorboard

from hivetune.dashboard.exporters.follow import reports_of
from hivetune.dashboard.exporters.tools import MLflow
from hivetune.run.status import hold_run

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


def report(python: str, run: Path, target: str, place: Path | str, *options: str) -> list[str]:
    return [python, "-m", "hivetune", "report", str(run), "--to", target, str(place), *options]


def kill_again_and_again(python: str, run: Path, target: str, place: Path, kills: int, *, shift: float) -> None:
    """Let the run go on, while every third time its worker resumes some steps before. `shift`: of their losses."""
    moments = random.Random(kills)
    began, step = time.monotonic(), 60
    make_steps(run, 1, step)
    subprocess.run(report(python, run, target, place), check=True, capture_output=True)
    usual_s = time.monotonic() - began
    with hold_run(run):
        for number in range(kills):
            process = subprocess.Popen(report(python, run, target, place, "--follow"), stderr=subprocess.DEVNULL)
            for _ in range(4):
                make_steps(run, step + 1, step + 25, shift=shift * number)
                step += 25
                time.sleep(moments.uniform(0, 0.4) * usual_s)
            process.send_signal(signal.SIGKILL)
            process.wait()
            if number % 3 == 1:
                step -= moments.randrange(1, 120)
                take_back(run, step)
        follower = subprocess.Popen(report(python, run, target, place, "--follow"), stderr=subprocess.DEVNULL)
        take_back(run, step - 15)
        make_steps(run, step - 14, step + 40, shift=-shift)
    assert follower.wait(60) == 0, "it ends by itself when the run does"


def points_of(read: dict[str, list[list[float]]]) -> Points:
    found: Points = {}
    for kind in ("step", "validation"):
        for step, value in read[kind]:
            assert (kind, int(step)) not in found, f"{kind} {step} is there twice"
            found[kind, int(step)] = value
    return found


def test_a_run_ends_in_mlflow_when_its_newest_point_was_made() -> None:
    """However late it is reported: MLflow shows the time between start and end as its duration."""
    client, sink = Mock(), MLflow.__new__(MLflow)
    client.get_metric_history.side_effect = [[SimpleNamespace(step=3, timestamp=7250)], []]
    sink._client, sink._run = client, "r"
    sink.finish("done", {})
    client.set_terminated.assert_called_once_with("r", "FINISHED", end_time=7250)


@pytest.mark.slow
def test_an_event_file_has_no_gap_and_no_double_after_kills(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    kill_again_and_again(sys.executable, run, "tensorboard", tmp_path / "tb", 3, shift=0.1)
    assert read_by_tensorboard(tmp_path / "tb") == pytest.approx(float32(points_in(run)))


@pytest.mark.proof
@pytest.mark.parametrize("target", ["tensorboard", "mlflow", "trackio", "wandb"])
def test_ten_kills(
    target: str, tmp_path: Path, python_with: Callable[[str], str], record_property: Callable[..., None]
) -> None:
    run, place = make_run(tmp_path), tmp_path / "place"
    python = sys.executable if target == "tensorboard" else python_with(target)
    # MLflow can't remove a point, so only steps that come out as before are the journal's again (law 4, on a CPU).
    kill_again_and_again(python, run, target, place, 10, shift=0.0 if target == "mlflow" else 0.1)
    said = points_in(run)
    if target == "tensorboard":
        assert read_by_tensorboard(place) == pytest.approx(float32(said))
    else:
        where = f"sqlite:///{place}/mlflow.db" if target == "mlflow" else str(place)
        shown = subprocess.run(
            [python, "-c", READERS[target], where], check=True, capture_output=True, text=True
        ).stdout
        read = json.loads(shown.splitlines()[-1])
        assert points_of(read) == pytest.approx(said)
        if target == "mlflow":
            assert (read["status"], read["model"]) == ("FINISHED", "smollm2-135m")
    record_property("kills", 10)
    record_property("points", len(said))


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Start a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.proof
def test_a_server_that_never_answers_is_told_and_met_again(
    tmp_path: Path, python_with: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    run, python = make_run(tmp_path), python_with("mlflow")
    make_steps(run, 1, 5)
    with silent_server() as url:
        done = subprocess.run(report(python, run, "mlflow", url), capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "mlflow at http://127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr
    assert [bool(each.problem) for each in reports_of(run)] == [True]
