"""What it is all for: a log of interactions trains to its end on two cores, whatever happens on the way, and answers.

The demo's rows and the real model; on the way one SIGKILL of the worker, one row whose gradient is NaN and one error
of hipBLASLt, as a card would say it (spoiled_worker.py).
"""

import functools
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train.planned import vouch

from hivetune.base.disk import read_json, write_json
from hivetune.base.journal import read_journal
from hivetune.config import parse_config
from hivetune.synth.demo import SYSTEM_PROMPTS, write_demo_data
from hivetune.train import start
from hivetune.train.open import Run, load_run
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms
from hivetune.train.supervise.supervisor import supervise_run

pytestmark = pytest.mark.slow

WORKER = str(Path(__file__).with_name("spoiled_worker.py"))
# When it happens, as shares of the way.
NAN_AT, KILL_AT, HIPBLASLT_AT = 0.25, 0.5, 0.75
QUESTION = "What does json.dumps do?"
MOST_HOURS, MOST_LOSS = 2.0, 3.0
# The second half of a log asks what the first did, in other words.
AGAIN = "One more time, in your own order of words: {}"


def test_a_tiny_model_and_two_hundred_rows(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = reach_the_goal(tmp_path, 200, str(tiny_model_folder), monkeypatch, vouched=True)
    assert told["rows in"] == 200 and told["restarts"] == 2


@pytest.mark.proof
def test_ten_thousand_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Stopped at any moment and started again, it goes on: its folder outlives the process (tools/proof.py)."""
    folder = Path(os.environ.get("HIVETUNE_PROOF_FOLDER", tmp_path))
    monkeypatch.setenv("HIVETUNE_HOME", str(folder / "home"))
    told = reach_the_goal(folder, int(os.environ.get("HIVETUNE_PROOF_ROWS", "10000")), "smollm2-135m", monkeypatch)
    for name, value in told.items():
        record_property(name, value)
    assert told["loss of the last tenth of the steps"] < MOST_LOSS and told["validation loss"] < MOST_LOSS
    assert told["hours"] < MOST_HOURS


def reach_the_goal(
    folder: Path, num_rows: int, model: str, monkeypatch: pytest.MonkeyPatch, *, vouched: bool = False
) -> dict[str, Any]:
    """Train, be killed, go on; returns what it came to. Every claim but those about loss and time is checked here."""
    data = folder / "interactions.jsonl"
    if not data.exists():
        write_rows(data, num_rows)
    config = parse_config(
        {
            "model": model,
            "data": {"path": str(data), "system_prompts": SYSTEM_PROMPTS},
            "lora": {"r": 8, "alpha": 16},
            "batch_size": 8,
            "epochs": 1,
            "patience": None,  # the whole epoch is the claim
            "learning_rate": 5e-4,
            "output": str(folder / "run"),
        },
        "users_goal",
    )
    run = open_run(config, "users_goal")
    if vouched:
        vouch(run.model)
    script = write_script(run)
    monkeypatch.setattr(start, "supervise_run", functools.partial(supervise_run, worker=WORKER, replay=WORKER))
    document = train_run(run, Terms(functools.partial(kill_once, run, script["kill_at"])))
    run = load_run(run.folder)
    assert (document["status"], document["steps"]) == ("done", len(run.plan.steps))
    assert (document["restarts"], document["faults"]) == (2, ["killed", "blas-failed"])
    rows = document["rows"]
    out = sum(
        sum(count.values()) if isinstance(count, dict) else count for key, count in rows.items() if key != "rows_in"
    )
    assert rows["rows_in"] == out == num_rows
    assert [row for amendment in run.plan.amendments for row in amendment.rows] == [script["nan_row"]]
    source = run.snapshot.info(script["nan_row"]).source
    assert rows["quarantined"] == 1 and document["quarantined"][0].startswith(f"{source}: ")
    assert sorted(row for step in run.plan.steps for row in step.rows) == sorted(
        set(run.snapshot.rows("train")) - {script["nan_row"]}
    )
    events = list(read_journal(run.folder / "events.jsonl"))
    failures = [entry for entry in events if entry["event"] == "failure"]
    assert [entry["fault"] for entry in failures] == ["killed", "blas-failed"]
    assert failures[1]["shape"] == [8, 412, 896] and failures[1]["step"] == script["failing_step"]
    answer = answer_in_peft(run, SYSTEM_PROMPTS["librarian"], QUESTION)
    assert answer.strip()
    losses = [entry["loss"] for entry in read_journal(run.folder / "metrics.jsonl") if entry["event"] == "step"]
    assert len(losses) == document["steps"] and all(math.isfinite(loss) for loss in losses)
    return {
        "rows in": rows["rows_in"],
        **{key: json.dumps(value) for key, value in rows.items() if key != "rows_in"},
        "steps": document["steps"],
        "hours": round(hours_of(events), 3),
        "restarts": len(failures),
        "faults": ", ".join(entry["fault"] for entry in failures),
        "loss of the first step": round(losses[0], 3),
        "loss of the last tenth of the steps": round(statistics.mean(losses[-max(1, len(losses) // 10) :]), 3),
        "validation loss": round(document["best"]["loss"], 3) if document["best"] else None,
        "tokens per second": round(document["tokens_per_second"]),
        "quarantined row": document["quarantined"][0].replace(f"{folder}/", ""),
        "question": QUESTION,
        "answer": answer,
    }


def write_rows(path: Path, num_rows: int) -> None:
    """`num_rows` lines: the demo's, the failed and broken among them, then the same questions in other words."""
    write_demo_data(path, 3 * num_rows)
    lines = path.read_text(encoding="utf-8").splitlines()
    whole = [row for row in map(as_row, lines) if row is not None and row.get("success")]
    asked = [json.dumps({**row, "task": AGAIN.format(row["task"])}, ensure_ascii=False) for row in whole]
    chosen = [*lines, *asked][:num_rows]
    assert len(chosen) == num_rows
    path.write_text("\n".join(chosen) + "\n", encoding="utf-8")


def as_row(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row


def write_script(run: Run) -> dict[str, int]:
    """Which rows and steps; the same when it is started again."""
    path = run.folder / "spoil.json"
    if not path.exists():
        steps = run.plan.steps
        nan_at, kill_at, failing = (int(share * len(steps)) for share in (NAN_AT, KILL_AT, HIPBLASLT_AT))
        script = {"nan_row": steps[nan_at].rows[0], "kill_at": kill_at}
        write_json(path, {**script, "failing_row": steps[failing].rows[0], "failing_step": failing})
    return dict(read_json(path))


def kill_once(run: Run, at: int, done: int) -> None:
    killed = run.folder / "goal.killed"
    if done >= at and not killed.exists():
        killed.touch()
        attempts = [entry for entry in read_journal(run.folder / "events.jsonl") if entry["event"] == "attempt"]
        os.kill(attempts[-1]["pid"], signal.SIGKILL)


def hours_of(events: list[dict[str, Any]]) -> float:
    """From each supervisor's start to its last word, summed: without the time in which nobody had started it."""
    seconds = 0.0
    started = time.time()
    for before, entry in zip([None, *events], events, strict=False):
        if entry["event"] == "supervisor_started":
            started = entry["time"]
        elif before is not None:
            seconds += entry["time"] - max(before["time"], started)
    return seconds / 3600


def answer_in_peft(run: Run, system: str, question: str) -> str:
    """The adapter at the top of the run folder, loaded by PEFT alone, answers greedily."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run.model), run.folder)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
