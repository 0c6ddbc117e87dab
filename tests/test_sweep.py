"""A whole sweep as a user starts it: a bad learning rate stops early, the best is judged, and the same again trains
nothing. Killed in the middle, it goes on.

The runs of the fast tests are a script that writes what a run leaves behind; those of the proof are real.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import hivetune
from data.models import make_sized_model
from gguf_families import write_model

from hivetune import sweep as station
from hivetune.base.disk import write_manifest
from hivetune.config import parse_config
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.process.cluster import ClusterNode, ClusterView, ask_cluster
from hivetune.records import Metric, Verdict
from hivetune.run.folder import read_record
from hivetune.sweep import run_sweep
from hivetune.train import queue
from hivetune.train import start as open_station

# Long enough that a run which goes on alone is not over before the next sweep has started on a busy machine.
STEPS = 3000
OVER = ("--over", "learning_rate=1e-7,5e-3", "--set", f"max_steps={STEPS}", "--set", "eval.prompts=4")
# Makes steps until it is told to stop; its loss falls the faster the nearer its learning rate is to 3e-3.
RUN = """
import json, math, signal, sys, time, zlib
from pathlib import Path
import yaml
run = Path(sys.argv[1])
config = yaml.safe_load((run / "config.resolved.yaml").read_text())["config"]
rate, stop = config["learning_rate"], []
(run / "options").write_text(" ".join(sys.argv[2:]))
if rate == 0.5:
    sys.exit(7)
if rate == 3e-3 and (run.parent / "the best one fails").exists():
    sys.exit(7)
if rate == 0.25:
    print("hivetune: left\\nhint: none\\nhivetune: no device is left\\nhint: mend that")
    sys.exit(4)
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
def line(**fields):
    text = json.dumps(fields)[:-1]
    return text + f', "crc32": {zlib.crc32(text.encode())}}}' + chr(10)
def lines(name):
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
record = json.loads((run / "run.json").read_text())
record.pop("seal", None)
steps = json.loads((run / "plan.json").read_text())["steps"]
done = max([line["step"] for line in lines("metrics.jsonl") if line["event"] == "step"], default=0)
with open(run / "starts", "a") as file:
    file.write("x")
for step in range(done + 1, steps + 1):
    time.sleep(0.01)
    loss = 3 - 0.05 * step / (1 + abs(math.log(rate / 3e-3)))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(line(event="step", step=step, loss=loss, seconds=0.01, tokens=9))
        if step % 3 == 0:
            file.write(line(event="validation", step=step, loss=loss))
    if step % 3 == 0:
        rows = json.loads((run / "rows.json").read_text())
        nll = [tokens * loss * (1 + 0.01 * (row % 5)) for row, tokens in rows]
        with open(run / "validation.jsonl", "a") as file:
            file.write(line(event="validation", step=step, rows=[row for row, _ in rows], nll=nll))
    if stop:
        sys.exit(143)
record |= {"status": "done", "result": {"best": {"step": steps - steps % 3, "loss": loss}}}
(run / "run.json").write_text(json.dumps(record))
"""


class Desk:
    """A user's folder: a small model, rows that can be learnt, a config, and a home."""

    def __init__(self, folder: Path):
        self.folder = folder
        write_model(folder / "model", "llama")
        rows = [{"prompt": f"What comes after {i}?", "completion": f"It is {i + 1}."} for i in range(150)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = "model: model\ndata: {path: rows.jsonl, near_duplicates: 0, validation: 0.2}\nbatch_size: 4\n"
        rest = f"epochs: 150\ndevice: cpu\nvalidate_every: {STEPS // 4}\npatience: null\n"
        (folder / "mine.yaml").write_text(config + rest)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, "HIVETUNE_HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "hivetune", "sweep", "mine.yaml", *arguments, "--json"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def call(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        home = str(self.folder / "home")
        done = hivetune("sweep", "mine.yaml", *arguments, "--json", cwd=self.folder, HIVETUNE_HOME=home)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.proof
def test_a_sweep_from_kill_to_verdict(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    killed = desk.start(*OVER)
    while not list((tmp_path / "home/runs").glob("*/metrics.jsonl")):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)  # its run goes on alone until the next sweep asks it to stop
    killed.communicate()
    code, document, err = desk.call(*OVER)
    assert code in (0, 6) and document["status"] == "done"
    best, worse = document["runs"]
    assert best["settings"] == ["learning_rate=5e-3"] and best["state"] == "done" and best["steps"] == STEPS
    assert worse["state"] == "stopped" and worse["steps"] < STEPS and "above the leader" in worse["why"]
    assert document["verdict"]["verdict"] in ("deploy", "iterate", "not-enough-evidence", "abort")
    chart = (Path(document["sweep"]) / "sweep.svg").read_text()
    assert "learning_rate=5e-3" in chart and "learning_rate=1e-7" in chart
    assert "stopped at 25%" in err
    again, told, _ = desk.call(*OVER)
    assert (again, told["already_done"], told["runs"]) == (code, True, document["runs"])


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config on real rows, whose runs are the script and whose winner is deployed."""

    def command(run: Path) -> list[str]:
        snapshot = station.load_run(run).snapshot
        rows = [(row, snapshot.num_trained(row)) for row in snapshot.rows("validation")]
        (run / "rows.json").write_text(json.dumps(rows))
        return [sys.executable, "-c", RUN, str(run)]

    monkeypatch.setattr(queue, "resume_command", command)
    monkeypatch.setattr(queue, "QUEUE_LOOK_S", 0.02)
    monkeypatch.setattr(station, "evaluate_run", lambda run: None)
    verdict = Verdict("deploy", ("it is better",), (Metric("loss", 3.0, 2.0, -1.0, (-1.1, -0.9), 9, 0.0, True),))
    monkeypatch.setattr(station, "judge_run", lambda run: verdict)
    rows = [{"prompt": f"What comes after {i}?", "completion": f"It is {i + 1}."} for i in range(150)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl"), "near_duplicates": 0, "validation": 0.2}
    model = make_sized_model(tmp_path / "model")  # a tokenizer without weights
    write_manifest(model)
    monkeypatch.setattr(open_station, "fetch_model", lambda name, progress: model)
    return parse_config({"model": str(model), "data": data, "max_steps": 24, "batch_size": 4, "device": "cpu"})


def starts(line: dict[str, Any]) -> int:
    return len((Path(line["run"]) / "starts").read_text())


def test_losers_stop_early_and_the_nearest_to_the_best_rate_wins(config: Any) -> None:
    told: list[str] = []
    document = run_sweep(config, "mine", ["learning_rate=1e-7,1e-3,3e-3,9e-3"], "all", told.append)
    assert document["best"] == "learning_rate=3e-3" and document["verdict"]["verdict"] == "deploy"
    states = {line["settings"][0]: (line["state"], line["steps"]) for line in document["runs"]}
    assert states["learning_rate=3e-3"] == ("done", 24)
    assert states["learning_rate=1e-7"][0] == "stopped" and states["learning_rate=1e-7"][1] < 12
    assert all(line["steps"] < 24 for line in document["runs"] if line["state"] == "stopped")
    assert any("learning_rate=1e-7: stopped at 25% of the steps" in text for text in told)
    finished = [line for line in document["runs"] if line["state"] == "done"]
    assert all(line["above_best"]["value"] > 0 for line in finished[1:])
    assert "learning_rate=1e-7" in (Path(document["sweep"]) / "sweep.svg").read_text()
    before = {line["run"]: starts(line) for line in document["runs"]}
    again = run_sweep(config, "mine", ["learning_rate=1e-7,1e-3,3e-3,9e-3"], "all", told.append)
    assert again["already_done"] and {line["run"]: starts(line) for line in again["runs"]} == before


def test_a_run_that_fails_takes_no_other_along(config: Any) -> None:
    told: list[str] = []
    document = run_sweep(config, "mine", ["learning_rate=0.5,3e-3"], "all", told.append)
    assert [line["state"] for line in document["runs"]] == ["done", "failed"]
    assert "exit code 7" in document["runs"][1]["why"]
    with pytest.raises(HivetuneError, match="every run failed"):
        run_sweep(config, "mine", ["learning_rate=0.5", "lora.r=4,8"], "all", told.append)


def test_no_run_is_left_when_the_best_one_fails_after_the_others_were_stopped(config: Any, tmp_path: Path) -> None:
    config = config.model_copy(update={"output": str(tmp_path / "runs")})
    told: list[str] = []

    def tell(words: str) -> None:
        told.append(words)
        if "stopped at 25%" in words:
            (tmp_path / "runs" / "the best one fails").touch()

    with pytest.raises(HivetuneError, match=r"every run that was not stopped early failed; the first: .*exit code 7"):
        run_sweep(config, "mine", ["learning_rate=1e-7,3e-3"], "all", tell)
    (tmp_path / "runs" / "the best one fails").unlink()
    document = run_sweep(config, "mine", ["learning_rate=1e-7,3e-3"], "all", tell)
    assert [line["state"] for line in document["runs"]] == ["done", "stopped"]


def test_on_a_cluster_each_device_takes_runs(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    view = ClusterView("10.0.0.5:6479", (ClusterNode("a", "10.0.0.5", True, 2), ClusterNode("b", "", True, 1)), 3)
    monkeypatch.setattr(station, "ask_cluster", lambda address: view)
    told: list[str] = []
    document = run_sweep(config, "mine", ["learning_rate=1e-3,3e-3"], "all", told.append, cluster="10.0.0.5:6479")
    assert "2 runs, 3 at a time" in told and document["best"] == "learning_rate=3e-3"
    assert {(Path(line["run"]) / "options").read_text() for line in document["runs"]} == {"--on 10.0.0.5:6479"}
    monkeypatch.setattr(station, "own_address", lambda address: "10.0.0.1")
    with pytest.raises(MachineNotFit, match=r"^no device is left\nhint: fix that; the same"):
        run_sweep(config, "mine", ["learning_rate=0.25,3e-3"], "all", told.append, cluster="10.0.0.5:6479")
    monkeypatch.setattr(station, "ask_cluster", ask_cluster)
    for address, kind, why in (
        ("nonsense", UsageError, "of the form HOST:PORT"),
        ("127.0.0.1:1", MachineNotFit, "refused"),
    ):
        with pytest.raises(kind, match=why):
            run_sweep(config, "mine", ["learning_rate=1e-3,4e-3"], "all", told.append, cluster=address)
    bound = config.model_copy(update={"workers": 2})
    with pytest.raises(UsageError, match="exclude each other"):
        run_sweep(bound, "mine", ["learning_rate=1e-3,3e-3"], "all", told.append, cluster="10.0.0.5:6479")


def test_keep_best_deletes_the_others_when_all_is_done(config: Any) -> None:
    document = run_sweep(config, "mine", ["learning_rate=1e-3,3e-3"], "best", lambda text: None)
    assert [Path(line["run"]).exists() for line in document["runs"]] == [True, False]
    assert read_record(Path(document["runs"][0]["run"]))["status"] == "done"


def test_the_others_are_deleted_later_when_all_were_kept_at_first(config: Any) -> None:
    for keep in ("all", "best"):
        document = run_sweep(config, "mine", ["learning_rate=1e-3,3e-3"], keep, lambda text: None)
    assert document["already_done"] and document["kept"] == "best"
    assert [Path(line["run"]).exists() for line in document["runs"]] == [True, False]


@pytest.mark.parametrize("over", ["eval.prompts=4,8", "learning_rate=1e-3,0.001", "gate.loss_gain=0,0.1"])
def test_one_training_is_not_run_twice(config: Any, over: str) -> None:
    """With `keep` best the loser was deleted, which was the winner's run."""
    with pytest.raises(UsageError, match="the same training"):
        run_sweep(config, "mine", [over], "best", lambda text: None)


def test_new_rows_are_another_sweep(config: Any, tmp_path: Path) -> None:
    first = run_sweep(config, "mine", ["learning_rate=1e-3,3e-3"], "all", lambda text: None)
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "What comes after twelve?", "completion": "It is thirteen."}) + "\n")
    second = run_sweep(config, "mine", ["learning_rate=1e-3,3e-3"], "all", lambda text: None)
    assert not second["already_done"] and second["sweep"] != first["sweep"]


def test_settings_that_change_the_rows_are_raced_to_the_end(config: Any) -> None:
    told: list[str] = []
    document = run_sweep(config, "mine", ["data.validation=0.2,0.3", "learning_rate=1e-7,3e-3"], "all", told.append)
    assert {line["state"] for line in document["runs"]} == {"done"}
    assert any("no run is stopped early" in text for text in told)


def test_without_validation_rows_there_is_nothing_to_choose_by(config: Any) -> None:
    bare = config.model_copy(update={"data": config.data.model_copy(update={"validation": 0.0})})
    with pytest.raises(UsageError, match="validation rows"):
        run_sweep(bare, "mine", ["lora.r=4,8"], "all", lambda text: None)
