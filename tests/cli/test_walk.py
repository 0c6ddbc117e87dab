"""The example of docs/python.md, and eval, export, register, chat and compare as commands on the run that it trains:
documents, exit codes, words for mistakes; and the contract, which is what scripts rely on.

`contract/contract.json` holds the commands, the keys of each one's `--json`, its exit code, and the files of a home. To
accept a wanted change, run this file with HIVETUNE_WRITE_CONTRACT=1 and say in CHANGELOG.md what users have to change.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command import hivetune
from gguf_families import write_model
from llama.fake_server import chat_reply, fake_server

from hivetune import walk
from hivetune.base.disk import sha256_bytes, sha256_file, write_manifest
from hivetune.base.journal import Journal
from hivetune.cli.main import COMMANDS
from hivetune.cycle.record import JOURNAL, loop_folder
from hivetune.errors import UsageError
from hivetune.judge import evaluate
from hivetune.judge.evaluate import evaluate_run, judge_run
from hivetune.process.parent import GRACE_S
from hivetune.release.gguf import base_gguf
from hivetune.run.folder import EVALUATION
from hivetune.train.open import load_run

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text(encoding="utf-8")
# What the config of the page has besides: few steps and answers. The rows have agents and checkers.
ROWS = '"data": {"path": "rows.jsonl", "near_duplicates": 0, "system_prompts": {"a": "You add.", "b": "You count."}}'
FEW = '"max_steps": 4, "batch_size": 4, "learning_rate": 1e-3, "lora": {"r": 4, "alpha": 8},'
FEW += ' "eval": {"prompts": 6, "tokens": 6}'
CONFIG = "model: MODEL\ndata: {path: rows.jsonl}\nmax_steps: 4\ncycle: {name: demo, after_rows: 500}\n"


class Workplace:
    """A folder with a run that was trained and evaluated by the page's example, and the command run in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run = folder / "my-run"

    def call(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        done = hivetune(*arguments, stdin=stdin, cwd=self.folder)
        return done.returncode, done.stdout, done.stderr

    def document(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        code, out, err = self.call(*arguments, "--json")
        assert out.count("\n") == 1, err
        return code, json.loads(out)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("walk")
    write_model(folder / "model", "llama")
    rows = [
        {
            "agent": "ab"[i % 2],
            "task": f"What is {i} plus {i + 1}?",
            "output": f"It is {2 * i + 1}.",
            "user_id": f"u{i % 7}",
            "checker": {"name": "number_close", "value": 2 * i + 1},
        }
        for i in range(100)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "run.yaml").write_text(CONFIG.replace("MODEL", str(folder / "model")))
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    changes = {'"data": {"path": "rows.jsonl"}': ROWS, '"epochs": 1': FEW, "smollm2-135m": str(folder / "model")}
    for old, new in changes.items():
        assert example.count(old) == 1
        example = example.replace(old, new)
    (folder / "example.py").write_text(example)
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, HIVETUNE_HOME=str(folder / "home")),
        mock.patch.object(evaluate, "AGAIN_AFTER_S", 0.0),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        runpy.run_path("example.py")
    assert err.getvalue() == "" and out.getvalue().endswith("helpdesk@1\n")
    assert re.search(r"^100 rows, \d+ usable$", out.getvalue(), re.MULTILINE)
    return Workplace(folder)


@pytest.fixture
def place(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setenv("HIVETUNE_HOME", str(workplace.folder / "home"))
    monkeypatch.setattr(evaluate, "AGAIN_AFTER_S", 0.0)  # six prompts are too few for times, however often
    return workplace


@pytest.fixture
def evaluation(place: Workplace) -> Iterator[dict[str, Any]]:
    """The evaluation of the run, as it stays after each test."""
    path = place.run / EVALUATION
    kept = path.read_bytes()
    found = json.loads(kept)
    for row in found["answers"]:  # so that the times of a busy machine decide nothing below
        row["tuned"]["seconds"] = row["base"]["seconds"]
    path.write_text(json.dumps(found))
    yield found
    path.write_bytes(kept)


def test_every_station_of_the_page_is_there_and_documented() -> None:
    named = {*re.findall(r"walk\.(\w+)\(", PAGE), "open_trained", "prepare", "serve"}
    assert len(named) == 11 and all(vars(walk)[name].__doc__ for name in named)


def test_an_interrupted_eval_ends_its_servers_at_once(place: Workplace, evaluation: dict[str, Any]) -> None:
    """In the middle of answering: nothing is judged by a half, and what was answered is kept."""
    (place.run / EVALUATION).unlink()
    with pytest.raises(UsageError) as refused:
        judge_run(load_run(place.run))
    assert "hivetune eval" in refused.value.hint, "what was not evaluated has no verdict"
    answers = place.folder / "home" / "answers"
    before = set(answers.glob("*/answers.jsonl"))
    command = [sys.executable, "-m", "hivetune", "eval", str(place.run), "--set", "eval.tokens=100", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        # A border of two processes: there is only the file to wait on.
        while set(answers.glob("*/answers.jsonl")) == before:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, time.monotonic() - sent < GRACE_S) == (130, True), err
    assert "run it again to resume" in json.loads(out)["error"]["hint"]
    assert not (place.run / EVALUATION).exists()


def test_a_verdict_is_judged_again_without_measuring(place: Workplace, evaluation: dict[str, Any]) -> None:
    assert evaluation["problems"] == [] and len(evaluation["answers"]) == 6
    assert all(isinstance(row[side], float) for row in evaluation["rows"] for side in ("base", "tuned"))
    assert evaluation["answered_by"].endswith(", q8_0")
    assert all(evaluation[side]["peak_memory_bytes"] for side in ("base", "tuned"))
    code, harder = place.document("eval", str(place.run), "--set", "gate.loss_gain=50")
    assert (code, harder["verdict"], harder["gate"]["loss_gain"]) == (6, "iterate", 50)
    assert harder["answers"] == evaluation["answers"] and harder["rows"] == evaluation["rows"]
    (earlier,) = harder["earlier"]
    assert (earlier["verdict"], earlier["gate"]["loss_gain"]) == (evaluation["verdict"], 0)
    assert json.loads((place.run / EVALUATION).read_text())["verdict"] == "iterate"


def test_from_export_to_chat(place: Workplace) -> None:
    export = ("export", str(place.run), "--to", "gguf", "--quant", "f32")
    code, exported = place.document(*export)
    assert code == 0 and exported["made"]
    proof = exported["proof"]
    assert proof["holds"] and proof["conversations"] == 50 and proof["ended"] == proof["passages"] == 8
    assert proof["typical"] < 0.02 and proof["effect"] == pytest.approx(1, abs=0.1)
    code, again = place.document(*export)
    assert code == 0 and not again["made"] and again["proof"] == proof and again["size_bytes"] == exported["size_bytes"]

    code, answer = place.document("chat", exported["path"], "--prompt", "What is 1 plus 2?", "--max-tokens", "4")
    assert code == 0 and answer["prompt_tokens"] > 0 and answer["new_tokens"] <= 4
    code, _, err = place.call("chat", exported["path"], "--max-tokens", "4", stdin="hi\n/new\nho\n")
    assert code == 0, err
    asked = ("chat", "last", "--quant", "f32", "--prompt", "hi", "--max-tokens", "2")
    code, _, err = place.call(*asked)
    words = ("no system prompt stands", "system prompt of ")
    assert code == 0 and any(word in err for word in words), err  # which of the two is the split's to say
    code, _, err = place.call(*asked, "--system", "")
    assert code == 0 and "system prompt" not in err

    # Nobody talks to a file whose template was changed after the export: its prompts have other token ids.
    file = Path(exported["path"])
    good, manifest = file.read_bytes(), file.parent / "manifest.json"
    changed = good.replace(b"<|im_start|>assistant", b"<|im_start|>assistent")
    known = manifest.read_text()
    file.write_bytes(changed)  # as somebody would who replaces file and manifest: the hashes are right
    manifest.write_text(known.replace(sha256_bytes(good), sha256_bytes(changed)))
    try:
        code, refused = place.document("chat", str(file), "--prompt", "hi", "--max-tokens", "2")
    finally:
        file.write_bytes(good)
        manifest.write_text(known)
    assert code == 1 and "prompts that differ from training" in refused["error"]["message"]


def test_every_kind_of_export_is_proven_and_one_without_its_adapter_refused(place: Workplace) -> None:
    for to in ("gguf-adapter", "merged", "adapter"):
        code, exported = place.document("export", str(place.run), "--to", to)
        assert code == 0 and exported["proof"]["holds"], exported
        # Four steps change little beside the rounding of 8 bits: the proof's own bound allows for that.
        assert to == "adapter" or exported["proof"]["effect"] > 0.5
    # The base in the place of the merged model, with a manifest that fits: only the numbers tell.
    code, exported = place.document("export", str(place.run), "--to", "gguf", "--quant", "f16", "--no-check")
    assert code == 0 and exported["proof"] is None
    opened, folder = load_run(place.run), Path(exported["folder"])
    try:
        shutil.copyfile(
            base_gguf(opened.config.model, sha256_file(opened.model / "manifest.json"), "f16"), exported["path"]
        )
        known = json.loads((folder / "manifest.json").read_text())
        write_manifest(folder, {key: value for key, value in known.items() if key not in ("schema", "files")})
        code, refused = place.document("export", str(place.run), "--to", "gguf", "--quant", "f16")
        assert code == 1 and "times the adapter's effect arrived" in refused["error"]["message"], refused
        code, refused = place.document("register", str(place.run), "--as", "other")
        assert code == 1 and "differs from the trained model" in refused["error"]["message"]
    finally:
        shutil.rmtree(folder)


def test_the_walk_from_verdict_to_champion(place: Workplace, evaluation: dict[str, Any]) -> None:
    """Registered with what was judged and exported, promoted only with a reason, rolled back, explained."""
    run = str(place.run)
    _, verdict = place.document("eval", run, "--set", "gate.loss_gain=-9")
    code, release = place.document("register", run, "--as", "adder")
    assert (code, release["release"], release["verdict"]) == (0, "adder@1", verdict["verdict"])
    assert place.document("register", run, "--as", "adder")[1]["new"] is False
    code, beside = place.document("compare", "base", "adder@1", "--run", run)
    assert code == 0 and [beside[side]["kind"] for side in ("base", "tuned")] == ["base", "release"], beside
    for side in ("base", "tuned"):  # the release has the run's adapter, whose answers are kept
        assert [each[side]["answer"] for each in beside["answers"]] == [
            each[side]["answer"] for each in evaluation["answers"]
        ]
    code, promoted = place.document("promote", "adder@1", "--force", "--reason", "a test")
    assert (code, promoted["aliases"]) == (0, ["champion"])
    code, why = place.document("releases", "adder")
    assert code == 0 and why["judgement"]["verdict"] == verdict["verdict"]
    assert why["data"]["trained"] == 16 and why["data"]["not_reached"] > 0  # four steps of four rows, not all there are
    assert why["settings"]["lora"]["r"] == 4 and why["machine"]["fingerprint"]
    code, refused = place.document("rollback", "adder")
    assert code == 2 and "no previous release" in refused["error"]["message"]
    assert [each for each in place.document("rm", "--unused")[1]["unused"] if each["what"] == "release"] == []
    code, text, _ = place.call("releases")
    assert code == 0 and "adder@1" in text and "champion" in text
    code, text, _ = place.call("releases", "adder")
    assert code == 0 and "promoted by" in text and ": a test" in text and "model:" in text
    judged = re.findall(r"judged (\S+) by \S+ with loss_gain (-?\d+)", text)
    assert judged[-1] == (verdict["verdict"], "-9") and (evaluation["verdict"], "0") in judged, text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("eval my-run --set lora.r=1", "this command can only change eval.* and gate.*"),
        ("export my-run --to ggfu", "choose one of adapter"),
        ("register my-run --as NoName", "can't be the name of a release"),
        ("chat my-run --json", "--json needs --prompt"),
    ],
)
def test_mistakes_are_told_in_words(place: Workplace, line: str, words: str) -> None:
    found, _, err = place.call(*line.split())
    assert found == 2 and words in err and "Traceback" not in err


def test_a_model_that_cant_be_served_is_judged_by_its_loss_and_the_verdict_says_so(
    place: Workplace, evaluation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = UsageError("the converter does not know this architecture")
    monkeypatch.setattr(evaluate, "find_artefact", mock.Mock(side_effect=refusal))
    found = evaluate_run(load_run(place.run))
    assert found["rows"] == evaluation["rows"] and found["answers"] == []
    assert "nothing: llama.cpp can't serve this model here: the converter does not" in found["answered_by"]
    assert any(reason.startswith("not compared: success") for reason in found["reasons"])


def test_sides_of_every_kind_are_compared(place: Workplace, evaluation: dict[str, Any]) -> None:
    run = str(place.run)
    code, compared = place.document("compare", "base", run)
    assert code == 0, compared
    for side in ("base", "tuned"):
        losses = [row[side] for row in compared["rows"]]
        assert losses == pytest.approx([row[side] for row in evaluation["rows"]], rel=1e-4)
    assert compared["not_compared"] == {} and len(compared["answers"]) == 6
    exported = place.document("export", run, "--to", "gguf", "--quant", "f32", "--no-check")[1]["path"]
    with fake_server(lambda body: chat_reply("It is 1.", tokens=9)) as server:
        side = f"{server.url}#m"
        code, against = place.document("compare", exported, side, "--run", run)
        assert code == 0 and "loss" in against["not_compared"] and len(against["answers"]) == 6, against
        settings = ("--set", f"eval.baseline={side}", "--set", "gate.max_gb=9", "--set", "gate.max_seconds=99")
        code, against = place.document("eval", run, *settings)
        assert code in (0, 6) and "loss" in against["not_compared"], against
        found = {metric["name"]: metric["passed"] for metric in against["metrics"]}
        assert found["max_seconds"] and found["max_gb"] and found["peak_memory_bytes"] is None


# The contract.

CONTRACT = Path(__file__).parents[1] / "contract" / "contract.json"
LINES = (
    "collect rows.jsonl",
    "runs",
    "show last",
    "show last --log",
    "check rows.jsonl",
    "plan run.yaml",
    "train last",
    "clients --new anna",
    "cycle run.yaml --dry-run",
    "cycle status",
    "rm --unused",
    "config",
    "export last --to gguf-adapter",
    "register last --as again",
    "promote again@1 --force --reason contract",
    "status",
    "releases",
    "releases again@1",
    "rollback again",
    "releases --retire again",
    "chat last --prompt hi --max-tokens 2",
    "forget --user u3",
    "train missing.yaml",
    "show nothing-of-this-name",
)
# Keys below these are data: reasons, names of measures, settings, and what happened in a run (how long it took decides
# whether it has samples of the machine).
DATA = {"events[]", "rejected", "set_aside", "quarantined", "settings", "defaults", "properties", "$defs", "by"}
HOME = {"hive.db", "models", "releases", "snapshots"}
DATA |= {"layouts", "understood", "unused", "exports"}


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
            found.add("/".join("*" if len(part) >= 12 and part.isalnum() else part for part in parts))
    return sorted(found)


def test_commands_answer_as_they_did(place: Workplace, evaluation: dict[str, Any]) -> None:
    Journal(loop_folder("demo") / JOURNAL).close()
    seen: dict[str, Any] = {"commands": sorted(COMMANDS)}
    for line in LINES:
        code, document = place.document(*line.split())
        seen[line] = {"exit": code, "keys": sorted(shape(document))}
    # Other tests of this file may have made more exports and comparisons.
    home = place.folder / "home"
    seen["files of a release"] = [name for name in files_of(home / "releases/again/1") if name[:8] != "exports/"]
    seen["files of the home"] = sorted({path.name for path in home.iterdir()} & HOME)
    if os.environ.get("HIVETUNE_WRITE_CONTRACT") == "1":
        CONTRACT.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    assert seen == json.loads(CONTRACT.read_text(encoding="utf-8"))
