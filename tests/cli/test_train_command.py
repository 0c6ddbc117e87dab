"""`hivetune train` on three lines of YAML: finds its run again, refuses another, stops cleanly."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import hivetune
from gguf_families import write_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hivetune.base.disk import lock, manifest_problems
from hivetune.cli.arguments import read_settings
from hivetune.cli.output import duration
from hivetune.config import load_config
from hivetune.run.folder import read_record, write_record

pytestmark = pytest.mark.slow

KEYS = {"schema", "run", "status", "steps", "trained_tokens", "rows", "loss_first", "loss_last", "tokens_per_second"}
KEYS |= {"samples_per_second", "peak_memory_bytes", "restarts", "quarantined"}
ROW_KEYS = {"rows_in", "trained", "held_out", "duplicates", "rejected", "set_aside", "quarantined", "not_reached"}


REPORT_TO = "report_to=[tensorboard, trackio]"  # trackio is in no environment that tests have


def steps_in_tensorboard(run: Path) -> list[int]:
    """Return the steps of a run's event files, as TensorBoard reads them."""
    read = EventAccumulator(str(run / "tensorboard")).Reload()
    return [event.step for event in read.Scalars("train/loss")]


class Place:
    """A user's folder: a model, rows, a config of three lines, and a home."""

    def __init__(self, folder: Path):
        self.folder = folder
        write_model(folder / "model", "llama")
        rows = [{"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}."} for i in range(60)]
        lines = [*map(json.dumps, rows), "{broken"]
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "mine.yaml").write_text("model: model\ndata: {path: rows.jsonl, near_duplicates: 0}\nbatch_size: 4\n")

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, "HIVETUNE_HOME": str(self.folder / "home")}
        command = [sys.executable, "-m", "hivetune", *arguments, "--json"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def call(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        done = hivetune(*arguments, "--json", cwd=self.folder, HIVETUNE_HOME=str(self.folder / "home"))
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("user"))


def test_three_lines_train_once(place: Place) -> None:
    code, document, err = place.call("train", "mine.yaml", "--set", "max_steps=3", "--set", REPORT_TO)
    assert code == 0
    assert "nothing is reported to trackio" in err, "a tool that is missing is said, and stops nothing"
    assert document.keys() >= KEYS
    assert document["rows"].keys() == ROW_KEYS
    rows = document["rows"]
    placed = [
        sum(value.values()) if isinstance(value, dict) else value for key, value in rows.items() if key != "rows_in"
    ]
    assert sum(placed) == rows["rows_in"] == 61
    run = Path(document["run"])
    assert (run / "adapter_model.safetensors").exists()
    assert (run / "manifest.json").exists()
    before = (run / "metrics.jsonl").read_bytes()
    assert steps_in_tensorboard(run) == [1, 2, 3]
    code, again, err = place.call("train", "mine.yaml", "--set", "max_steps=3")
    assert (code, again["already_done"]) == (0, True)
    assert "nothing was trained" in err
    assert (run / "metrics.jsonl").read_bytes() == before
    code, refused, _ = place.call("train", "mine.yaml", "--set", "max_steps=4", "--set", f"output={run}")
    assert code == 2
    assert "max_steps: 3 there, 4 here" in refused["error"]["message"]


def test_an_adapter_that_was_lost_is_written_again_under_any_name(place: Place, tmp_path: Path) -> None:
    _, document, _ = place.call("train", "mine.yaml", "--set", "max_steps=3")
    run = tmp_path / "copy"
    shutil.copytree(document["run"], run)
    before = (run / "adapter_model.safetensors").read_bytes()
    code, again, _ = place.call("train", str(run))
    assert (code, again["already_done"], again["run"]) == (0, True, str(run))
    (run / "adapter_model.safetensors").unlink()
    code, refused, _ = place.call("export", str(run), "--to", "adapter")
    assert code in (1, 2) and f"hivetune train {run}" in refused["error"]["hint"]
    code, again, _ = place.call("train", str(run))
    assert (code, again["already_done"], again["steps"]) == (0, False, 3)
    assert (run / "adapter_model.safetensors").read_bytes() == before


def test_a_disk_without_room_for_the_checkpoints_leaves_no_run(place: Place, small_disk: Path) -> None:
    code, refused, _ = place.call("train", "mine.yaml", "--set", "lora.r=2048", "--set", f"output={small_disk}/run")
    assert code == 5
    assert "checkpoints and adapter need" in refused["error"]["message"]
    assert not (small_disk / "run").exists()


def test_a_held_run_is_busy(place: Place) -> None:
    code, document, _ = place.call("train", "mine.yaml", "--set", "max_steps=1", "--set", "seed=2")
    assert code == 0
    run = Path(document["run"])
    write_record(run, {**read_record(run), "status": "new"})
    with lock(run):
        code, document, _ = place.call("train", str(run))
    assert code == 75
    assert str(os.getpid()) in document["error"]["message"]


def test_a_signal_stops_after_a_checkpoint(place: Place) -> None:
    output = place.folder / "stopped"
    arguments = ("train", "mine.yaml", "--set", "epochs=2000", "--set", "patience=null", "--set", f"output={output}")
    process = place.start(*arguments)
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or b'"event": "step"' not in (output / "metrics.jsonl").read_bytes():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.1)  # a border of two processes: there is nothing to wait on but the file
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    document = json.loads(out)
    assert "everything up to it is saved" in document["error"]["message"]
    assert list((output / "checkpoints").iterdir())


def test_what_can_not_be_trained_leaves_no_run(place: Place) -> None:
    bare = place.folder / "bare"
    if not bare.exists():
        write_model(bare, "llama")
        (bare / "chat_template.jinja").unlink(missing_ok=True)
        settings = json.loads((bare / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    code, document, _ = place.call("train", "mine.yaml", "--set", "model=bare")
    assert (code, "no chat template" in document["error"]["message"]) == (2, True)
    (place.folder / "empty.jsonl").write_text("")
    code, document, _ = place.call("train", "mine.yaml", "--set", "data.path=empty.jsonl")
    assert (code, document["error"]["type"]) == (3, "DataRefused")
    code, document, _ = place.call("train", "mine.yaml", "--set", "workers=127.0.0.1:9", "--set", "output=nobody")
    assert (code, "does not answer" in document["error"]["message"]) == (4, True)
    assert not (place.folder / "nobody").exists(), "a run that never began"
    checker = "eval.checker={name: function, file: nothing.py}"  # of use when it is trained only
    code, document, _ = place.call("train", "mine.yaml", "--set", checker, "--set", "output=nobody")
    assert (code, document["error"]["message"]) == (2, "eval.checker: nothing.py is not a file")
    assert not (place.folder / "nobody").exists()


def test_the_model_of_rows_may_be_said_as_a_setting() -> None:
    settings, name = read_settings("faq.json", None, ["epochs=2", "model=someone/small"])
    assert (settings.model, settings.epochs, name) == ("someone/small", 2, "faq")


def test_rows_alone_train_and_init_writes_what_trains(place: Place) -> None:
    words = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "inlet", "jetty")
    rows = [
        {"question": f"Where is the {words[i % 10]} of {words[i * 7 // 9 % 10]} {i}?", "answer": f"{i} miles {i * i}"}
        for i in range(80)
    ]
    (place.folder / "faq.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    code, document, _ = place.call("train", "faq.json")
    assert code == 2
    assert document["error"]["message"] == "faq.json holds rows, and no model is given"
    own = ("--set", "data.on_private=keep", "--set", "patience=2")
    code, document, _ = place.call("init", "faq.json", "--model", "model", *own)
    assert code == 0
    text = (place.folder / "faq.yaml").read_text()
    assert text.startswith("# Written by `hivetune init` from faq.json. Train with it: hivetune train faq.yaml\n")
    assert "# 80 rows: " in text
    data = {"path": "faq.json", "on_private": "keep"}
    assert document["settings"] == {"model": "model", "data": data, "patience": 2, "max_length": 64}
    planned = place.call("plan", "faq.yaml")[1]
    assert planned["workload"]["rows_known"] == "80 rows checked"
    assert f": about {duration(planned['hours'] * 3600)} of training, " in text, "init and plan name one time"
    assert f"{planned['workload']['rows']} to train, " in text, "and one number of rows"
    code, loop, _ = place.call("cycle", "faq.yaml", "--dry-run")
    assert (code, load_config(place.folder / "faq.yaml").cycle.name) == (0, "faq"), loop
    code, again, _ = place.call("init", "faq.json", "--model", "model")
    assert (code, "already exists" in again["error"]["message"]) == (2, True)
    steps = ("--set", "max_steps=1")
    code, from_file, _ = place.call("train", "faq.yaml", *steps)
    assert code == 0
    code, from_rows, err = place.call("train", "faq.json", "--model", "model", "--set", "max_length=64", *own, *steps)
    assert "settings: 3 epochs, batch_size 16, learning_rate 0.0002, lora.r 16, max_length 64" in err
    assert (code, from_rows["run"], from_rows["already_done"]) == (0, from_file["run"], True)
    code, refused, _ = place.call("train", "faq.yaml", "--model", "model")
    assert (code, "but faq.yaml is a config" in refused["error"]["message"]) == (2, True)
    code, left, _ = place.call("rm", "--unused")
    checkpoints = str(Path(from_file["run"]) / "checkpoints")
    assert (code, left["pruned"]) == (0, False)
    assert checkpoints in [each["path"] for each in left["unused"] if each["what"] == "checkpoints"]
    code, gone, _ = place.call("rm", "--unused", "--yes")
    assert (code, gone["size_bytes"]) == (0, left["size_bytes"])
    assert not Path(checkpoints).exists()
    assert place.call("rm", "--unused")[1]["unused"] == []
    code, again, _ = place.call("train", "faq.yaml", *steps)
    assert (code, again["already_done"]) == (0, True)
    assert manifest_problems(Path(from_file["run"])) == []
    name = Path(from_file["run"]).name
    code, refused, _ = place.call("rm", name)
    assert (code, refused["error"]["hint"]) == (2, "give --yes")
    code, removed, _ = place.call("rm", name, "--yes")
    assert (code, removed["deleted"]) == (0, [from_file["run"]])
    assert not Path(from_file["run"]).exists()
    assert name not in [Path(each["run"]).name for each in place.call("runs")[1]["runs"]]
