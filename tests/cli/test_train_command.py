"""`train`, `init`, `bench` and `rm` on three lines of YAML: a run is found again, refuses another, stops cleanly."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command import hivetune
from gguf_families import write_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train.planned import vouch

from hivetune.base.disk import lock, manifest_problems
from hivetune.cli.arguments import read_settings
from hivetune.cli.output import duration
from hivetune.cli.train import combinations, summary
from hivetune.config import load_config
from hivetune.errors import UsageError
from hivetune.models.prepared import fetch_model
from hivetune.run.folder import read_record, write_record

KEYS = {"schema", "run", "status", "steps", "trained_tokens", "rows", "loss_first", "loss_last", "tokens_per_second"}
KEYS |= {"samples_per_second", "peak_memory_bytes", "restarts", "quarantined"}
ROW_KEYS = {"rows_in", "trained", "held_out", "duplicates", "rejected", "set_aside", "quarantined", "not_reached"}
REPORT_TO = "report_to=[tensorboard, trackio]"  # trackio is in no environment that tests have


class Place:
    """A user's folder: a model, rows, a config of three lines, and a home."""

    def __init__(self, folder: Path):
        self.folder = folder
        write_model(folder / "model", "llama")
        rows = [{"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}."} for i in range(60)]
        lines = [*map(json.dumps, rows), "{broken"]
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "mine.yaml").write_text("model: model\ndata: {path: rows.jsonl, near_duplicates: 0}\nbatch_size: 4\n")

    def call(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        done = hivetune(*arguments, "--json", cwd=self.folder, HIVETUNE_HOME=str(self.folder / "home"))
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    def refused(self, line: str, *settings: str) -> tuple[int, str]:
        """Return exit code and message of a command line that fails; `settings` may hold blanks."""
        code, document, _ = self.call(*line.split(), *(word for each in settings for word in ("--set", each)))
        return code, document["error"]["message"] + "\n" + document["error"]["hint"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    found = Place(tmp_path_factory.mktemp("user"))
    with mock.patch.dict(os.environ, HIVETUNE_HOME=str(found.folder / "home")), contextlib.chdir(found.folder):
        vouch(fetch_model("model"))
    return found


@pytest.fixture(scope="module")
def trained(place: Place) -> tuple[dict[str, Any], str]:
    """The document of a run of three steps, and what was said."""
    code, document, err = place.call("train", "mine.yaml", "--set", "max_steps=3", "--set", REPORT_TO)
    assert code == 0, err
    return document, err


@pytest.mark.slow
def test_three_lines_train_once(place: Place, trained: tuple[dict[str, Any], str]) -> None:
    document, err = trained
    assert "nothing is reported to trackio" in err, "a tool that is missing is said, and stops nothing"
    rows = document["rows"]
    assert document.keys() >= KEYS and rows.keys() == ROW_KEYS
    placed = [sum(n.values()) if isinstance(n, dict) else n for key, n in rows.items() if key != "rows_in"]
    assert sum(placed) == rows["rows_in"] == 61
    run = Path(document["run"])
    assert (run / "adapter_model.safetensors").exists() and (run / "manifest.json").exists()
    read = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in read.Scalars("train/loss")] == [1, 2, 3]
    before = (run / "metrics.jsonl").read_bytes()
    code, again, err = place.call("train", "mine.yaml", "--set", "max_steps=3")
    assert (code, again["already_done"], "nothing was trained" in err) == (0, True, True)
    assert (run / "metrics.jsonl").read_bytes() == before
    code, told = place.refused("train mine.yaml", "max_steps=4", f"output={run}")
    assert code == 2 and "max_steps: 3 there, 4 here" in told


@pytest.mark.slow
def test_a_copied_run_is_busy_while_it_is_held_and_its_lost_adapter_is_written_again(
    place: Place, trained: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    run = tmp_path / "copy"
    shutil.copytree(trained[0]["run"], run)
    known = read_record(run)
    write_record(run, {**known, "status": "new"})
    with lock(run):
        code, told = place.refused(f"train {run}")
    assert (code, str(os.getpid()) in told) == (75, True)
    write_record(run, known)
    before = (run / "adapter_model.safetensors").read_bytes()
    code, again, _ = place.call("train", str(run))
    assert (code, again["already_done"], again["run"]) == (0, True, str(run))
    (run / "adapter_model.safetensors").unlink()
    code, told = place.refused(f"export {run} --to adapter")
    assert code in (1, 2) and f"hivetune train {run}" in told
    code, again, _ = place.call("train", str(run))
    assert (code, again["already_done"], again["steps"]) == (0, False, 3)
    assert (run / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_a_signal_stops_after_a_checkpoint(place: Place) -> None:
    output = place.folder / "stopped"
    settings = ("epochs=2000", "patience=null", f"output={output}")
    command = [sys.executable, "-m", "hivetune", "train", "mine.yaml", "--json"]
    command += [word for each in settings for word in ("--set", each)]
    environment = {**os.environ, "HIVETUNE_HOME": str(place.folder / "home")}
    pipe, metrics = subprocess.PIPE, output / "metrics.jsonl"
    process = subprocess.Popen(command, cwd=place.folder, env=environment, stdout=pipe, stderr=pipe, text=True)
    deadline = time.monotonic() + 120
    while not metrics.exists() or b'"event": "step"' not in metrics.read_bytes():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.1)  # a border of two processes: there is nothing to wait on but the file
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "everything up to it is saved" in json.loads(out)["error"]["message"]
    assert list((output / "checkpoints").iterdir())


@pytest.mark.slow
def test_what_can_not_be_trained_leaves_no_run(place: Place, small_disk: Path) -> None:
    bare = place.folder / "bare"
    write_model(bare, "llama")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    (place.folder / "empty.jsonl").write_text("")
    for code, words, *changes in (
        (2, "no chat template", "model=bare"),
        (3, "contain no rows", "data.path=empty.jsonl"),
        (4, "does not answer", "workers=127.0.0.1:9"),
        (2, "nothing.py is not a file", "eval.checker={name: function, file: nothing.py}"),
        (5, "checkpoints and adapter need", "lora.r=2048", f"output={small_disk}/nobody"),
    ):
        found, told = place.refused("train mine.yaml", "output=nobody", *changes)
        assert (found, words in told) == (code, True), told
        assert not (place.folder / "nobody").exists() and not (small_disk / "nobody").exists()


def test_the_model_of_rows_may_be_said_as_a_setting() -> None:
    settings, name = read_settings("faq.json", None, ["epochs=2", "model=someone/small"])
    assert (settings.model, settings.epochs, name) == ("someone/small", 2, "faq")


@pytest.mark.slow
def test_rows_alone_train_and_init_writes_what_trains(place: Place) -> None:
    words = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "inlet", "jetty")
    rows = [
        {"question": f"Where is the {words[i % 10]} of {words[i * 7 // 9 % 10]} {i}?", "answer": f"{i} miles {i * i}"}
        for i in range(80)
    ]
    (place.folder / "faq.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert place.refused("train faq.json")[1].startswith("faq.json is a file of rows, but no model is given")
    own = ("--set", "data.on_private=keep", "--set", "patience=2")
    code, document, _ = place.call("init", "faq.json", "--model", "model", *own)
    assert code == 0
    text = (place.folder / "faq.yaml").read_text()
    assert text.startswith("# Written by `hivetune init` from faq.json. Train with it: hivetune train faq.yaml\n")
    assert "# 80 rows: " in text
    data = {"path": "faq.json", "on_private": "keep"}
    assert document["settings"] == {"model": "model", "data": data, "patience": 2, "max_length": 64}
    planned = place.call("plan", "faq.yaml")[1]
    assert planned["workload"]["rows_known"] == "from a check of 80 rows"
    assert f": about {duration(planned['hours'] * 3600)} of training, " in text, "init and plan name one time"
    assert f"{planned['workload']['rows']} to train, " in text, "and one number of rows"
    code, loop, _ = place.call("cycle", "faq.yaml", "--dry-run")
    assert (code, load_config(place.folder / "faq.yaml").cycle.name) == (0, "faq"), loop
    assert "already exists" in place.refused("init faq.json --model model")[1]
    steps = ("--set", "max_steps=1")
    code, from_file, _ = place.call("train", "faq.yaml", *steps)
    assert code == 0
    code, from_rows, err = place.call("train", "faq.json", "--model", "model", "--set", "max_length=64", *own, *steps)
    assert "settings: 3 epochs, batch_size 16, learning_rate 0.0002, lora.r 16, max_length 64" in err
    assert (code, from_rows["run"], from_rows["already_done"]) == (0, from_file["run"], True)
    assert "but faq.yaml is a config" in place.refused("train faq.yaml --model model")[1]
    run = Path(from_file["run"])
    code, left, _ = place.call("rm", "--unused")
    assert (code, left["pruned"]) == (0, False)
    assert str(run / "checkpoints") in [each["path"] for each in left["unused"] if each["what"] == "checkpoints"]
    code, gone, _ = place.call("rm", "--unused", "--yes")
    assert (code, gone["size_bytes"], (run / "checkpoints").exists()) == (0, left["size_bytes"], False)
    assert place.call("rm", "--unused")[1]["unused"] == []
    code, again, _ = place.call("train", "faq.yaml", *steps)
    assert (code, again["already_done"], manifest_problems(run)) == (0, True, [])
    assert "give --yes" in place.refused(f"rm {run.name}")[1]
    code, removed, _ = place.call("rm", run.name, "--yes")
    assert (code, removed["deleted"], run.exists()) == (0, [str(run)], False)
    assert run.name not in [Path(each["run"]).name for each in place.call("runs")[1]["runs"]]


# bench


def test_every_combination_is_run_and_a_grid_that_is_none_refused() -> None:
    assert combinations([]) == [[]]
    four = [["lora.r=4", "epochs=1"], ["lora.r=4", "epochs=2"], ["lora.r=8", "epochs=1"], ["lora.r=8", "epochs=2"]]
    assert combinations(["lora.r=4,8", "epochs=1,2"]) == four
    for text in ("lora.r", "=4", "lora.r=4,,8", "lora.r="):
        with pytest.raises(UsageError, match="KEY=A,B"):
            combinations([text])


def test_runs_that_failed_have_no_part_in_the_mean() -> None:
    figures = summary([{"loss_last": 2.0}, {"error": "it does not fit"}, {"loss_last": 4.0}])
    assert figures["loss_last"] == {"mean": 3.0, "sd": pytest.approx(2**0.5)}
    assert summary([{"loss_last": 2.0}])["loss_last"] == {"mean": 2.0, "sd": None}
    assert figures["train_seconds"] == {"mean": None, "sd": None}


@pytest.mark.slow
def test_two_ranks_are_compared_and_nothing_is_kept(place: Place) -> None:
    before = place.call("runs")[1]["runs"]
    code, found, err = place.call("bench", "mine.yaml", "--over", "lora.r=2,4", "--set", "max_steps=1")
    assert code == 0, err
    assert [line["settings"] for line in found["combinations"]] == [["lora.r=2"], ["lora.r=4"]]
    for line in found["combinations"]:
        assert [(run["seed"], run["steps"]) for run in line["runs"]] == [(0, 1)]
        assert line["figures"]["validation_loss"]["mean"] > 0 and line["figures"]["samples_per_second"]["mean"] > 0
    assert [path.name for path in (place.folder / "home/bench").iterdir() if path.is_dir()] == []
    assert place.call("runs")[1]["runs"] == before
