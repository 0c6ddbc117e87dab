"""The training loop: it learns, resumes bit for bit, keeps the best, stops before a bad update, obeys each setting."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train.worker.models import load_any
from train.worker.runs import learnable_rows, losses, make_run, metrics, run_bytes, run_training, stop_after
from transformers import AutoModelForCausalLM

from hivetune.base.disk import sha256_bytes
from hivetune.base.journal import read_journal
from hivetune.errors import UsageError
from hivetune.process.child import Heartbeat
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.run.folder import read_resolved
from hivetune.train.plan.steps import Amendment, append_amendment, read_amendments, read_plan
from hivetune.train.worker import checkpoint, session
from hivetune.train.worker import loop as train
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.protocol import Document
from hivetune.train.worker.session import AdamW, StepNotFinite

BASE = "base_model_name_or_path"


def test_a_run_learns_and_says_what_it_did(tiny_model_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path, learnable_rows(80))
    result = run_training(tmp_path, tiny_model_folder)
    assert result["status"] == "done" and result["steps"] == result["steps_planned"] == 16
    assert result["loss_last"] < 0.9 * result["loss_first"]
    plan = read_plan(tmp_path / "run")
    assert result["trained_tokens"] == plan.trained_tokens
    assert [e["trained_tokens"] for e in metrics(tmp_path) if e["event"] == "step"] == [
        step.trained_tokens for step in plan.steps
    ]
    assert result["peak_memory_bytes"] > 1 << 20 and result["tokens_per_second"] > 0
    assert result["best"]["loss"] == min(losses(tmp_path, "validation"))
    assert_peft_agrees(tmp_path / "run", tiny_model_folder)


def assert_peft_agrees(run: Path, model: Path) -> None:
    """What the folder says to PEFT is what was trained: it finds the base by itself and gives the same loss."""
    lora, tensors = read_adapter(run)
    ours = load_any(model, lora=lora, choices=Choices(path="fast"))
    fill(ours.adapter, tensors, str(run))
    base = AutoModelForCausalLM.from_pretrained(json.loads((run / "adapter_config.json").read_text())[BASE])
    wrapped = PeftModel.from_pretrained(base, run).eval()
    tokens = torch.arange(5, 25)
    logits = wrapped(input_ids=tokens[None]).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
    trained = torch.ones(20, dtype=torch.bool).index_fill(0, torch.tensor([0]), False)
    assert ours.nll([Document(0, tokens, trained)]).tolist() == pytest.approx([float(nll)], rel=1e-5)


def test_a_tensor_of_another_shape_is_refused_instead_of_broadcast(tiny_model_folder: Path, tmp_path: Path) -> None:
    """`[1, R]` fits into `[O, R]` by broadcasting; a hash that was mended with it says that all is well."""
    make_run(tmp_path, learnable_rows(40))
    run_training(tmp_path, tiny_model_folder, on_beat=stop_after(3))
    folder = max((tmp_path / "run/checkpoints").iterdir())
    tensors = load_file(folder / "state.safetensors")
    name = next(name for name in tensors if name.startswith("param/") and "lora_B" in name)
    tensors[name] = tensors[name][:1].clone()
    save_file(tensors, folder / "state.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / "state.safetensors").read_bytes()
    manifest["files"]["state.safetensors"] = {"size_bytes": len(data), "sha256": sha256_bytes(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"lora_B.weight has the shape \[1, 4\], this run needs \["):
        run_training(tmp_path, tiny_model_folder)


@pytest.mark.parametrize("path", ["fast", "general"])
def test_stopped_and_resumed_is_the_same_run_bit_for_bit(path: str, tiny_model_folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lora": {"r": 4, "dropout": 0.1}, "weight_decay": 0.1, "choices": {"path": path}}
    rows = learnable_rows(100)
    for name in ("whole", "parts"):
        make_run(tmp_path / name, rows, **settings)
    assert run_training(tmp_path / "whole", tiny_model_folder)["path"] == path
    for steps in (1, 6, 3):
        assert run_training(tmp_path / "parts", tiny_model_folder, on_beat=stop_after(steps))["status"] == "stopped"
    assert run_training(tmp_path / "parts", tiny_model_folder)["status"] == "done"
    assert run_bytes(tmp_path / "parts") == run_bytes(tmp_path / "whole")


def test_two_runs_of_one_config_are_equal_beside_other_load(tiny_model_folder: Path, tmp_path: Path) -> None:
    """The precision was chosen by timings: one of two runs came out in bfloat16. Nothing is pinned here."""
    rows, by_rules = learnable_rows(60), dict.fromkeys(("threads", "products"))
    for name in ("alone", "beside"):
        make_run(tmp_path / name, rows, dtype="auto", lora={"r": 4, "dropout": 0.1}, choices=by_rules)
    alone = run_training(tmp_path / "alone", tiny_model_folder)
    spin = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        beside = run_training(tmp_path / "beside", tiny_model_folder)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert alone["dtype"] == beside["dtype"]
    assert read_resolved(tmp_path / "alone/run")[1] == read_resolved(tmp_path / "beside/run")[1]
    assert run_bytes(tmp_path / "alone") == run_bytes(tmp_path / "beside")


def test_a_run_that_died_between_checkpoints_repeats_the_lost_steps(tiny_model_folder: Path, tmp_path: Path) -> None:
    class Death(BaseException):
        pass

    def die(heartbeat: object, done: int) -> None:
        if done == 9:
            raise Death

    rows = learnable_rows(100)
    for name in ("whole", "dead"):
        make_run(tmp_path / name, rows, validate_every=4)
    run_training(tmp_path / "whole", tiny_model_folder)
    with pytest.raises(Death):
        run_training(tmp_path / "dead", tiny_model_folder, on_beat=die)
    assert checkpoints.steps(tmp_path / "dead/run")[-1] < 9
    run_training(tmp_path / "dead", tiny_model_folder)
    assert run_bytes(tmp_path / "dead") == run_bytes(tmp_path / "whole")


def test_the_adapter_is_that_of_the_best_validation(tiny_model_folder: Path, tmp_path: Path) -> None:
    """A rate far too high makes the loss rise after a while; patience ends the run, the best step is what is left."""
    make_run(tmp_path, learnable_rows(60), learning_rate=0.3, epochs=20, validate_every=2, patience=3)
    result = run_training(tmp_path, tiny_model_folder)
    validations = losses(tmp_path, "validation")
    best = validations.index(min(validations))
    assert result["stopped_early"] and result["status"] == "done"
    assert len(validations) == best + 1 + 3
    assert result["adapter_step"] == result["best"]["step"] == 2 * (best + 1) < result["steps"]
    kept = load_file(checkpoints.folder_of(tmp_path / "run", result["adapter_step"]) / "state.safetensors")
    adapter = load_file(tmp_path / "run/adapter_model.safetensors")
    assert all(torch.equal(tensor, kept[f"param/{name}"]) for name, tensor in adapter.items())


def test_a_finished_run_trains_nothing_more(tiny_model_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path, learnable_rows(40), epochs=1)
    run_training(tmp_path, tiny_model_folder)
    before = run_bytes(tmp_path)
    run_training(tmp_path, tiny_model_folder)
    assert run_bytes(tmp_path) == before


def test_a_checkpoint_of_another_plan_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    rows = learnable_rows(40)
    make_run(tmp_path / "one", rows, epochs=1)
    make_run(tmp_path / "two", rows, epochs=1, seed=1)
    run_training(tmp_path / "one", tiny_model_folder)
    os.rename(tmp_path / "one/run/checkpoints", tmp_path / "two/run/checkpoints")
    with pytest.raises(UsageError, match="another plan"):
        run_training(tmp_path / "two", tiny_model_folder)


CHANGES: dict[str, Any] = {
    "lora.r": {"lora": {"r": 2, "alpha": 8}},
    "lora.alpha": {"lora": {"r": 4, "alpha": 16}},
    "lora.dropout": {"lora": {"r": 4, "alpha": 8, "dropout": 0.2}},
    "lora.target_modules": {"lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}},
    "batch_size": {"batch_size": 4},
    "epochs": {"epochs": 3},
    "max_steps": {"max_steps": 5},
    "learning_rate": {"learning_rate": 5e-3},
    "lr_schedule linear": {"lr_schedule": "linear"},
    "lr_schedule constant": {"lr_schedule": "constant"},
    "warmup share": {"warmup": 0.5},
    "warmup steps": {"warmup": 4},
    "weight_decay": {"weight_decay": 0.5},
    "clip": {"clip": 0.01},
    "clip off": {"clip": 0},
    "dtype": {"dtype": "bfloat16"},
    "dtype float16": {"dtype": "float16"},
    "seed": {"seed": 1},
}


@pytest.fixture(scope="module")
def usual_run(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("usual")
    make_run(folder, learnable_rows(60), validate_every=2)
    run_training(folder, tiny_model_folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("setting", CHANGES)
def test_each_setting_changes_the_adapter(
    setting: str, usual_run: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    make_run(tmp_path, learnable_rows(60), validate_every=2, **CHANGES[setting])
    run_training(tmp_path, tiny_model_folder)
    changed, usual = (load_file(f / "run/adapter_model.safetensors") for f in (tmp_path, usual_run))
    assert changed.keys() != usual.keys() or any(
        changed[name].shape != usual[name].shape or not torch.equal(changed[name], usual[name]) for name in usual
    )


@pytest.mark.slow
def test_a_clip_that_no_gradient_reaches_changes_nothing(tiny_model_folder: Path, tmp_path: Path) -> None:
    for name, clip in (("off", 0), ("high", 1e6)):
        make_run(tmp_path / name, learnable_rows(60), clip=clip)
        run_training(tmp_path / name, tiny_model_folder)
    off, high = (load_file(tmp_path / name / "run/adapter_model.safetensors") for name in ("off", "high"))
    assert all(torch.equal(off[name], high[name]) for name in off)


def test_validate_every_and_patience_are_obeyed(usual_run: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    assert [e["step"] for e in metrics(usual_run) if e["event"] == "validation"] == [2, 4, 6, 8, 10, 12]
    make_run(tmp_path, learnable_rows(60), validate_every=5, patience=None)
    run_training(tmp_path, tiny_model_folder)
    assert [e["step"] for e in metrics(tmp_path) if e["event"] == "validation"] == [5, 10, 12]


def test_a_row_that_is_not_finite_is_quarantined_and_the_step_made_anew(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = learnable_rows(60)
    make_run(tmp_path / "poisoned", rows)
    make_run(tmp_path / "without", rows)
    poison(monkeypatch, {7})
    run_training(tmp_path / "poisoned", tiny_model_folder)
    amendments = read_amendments(tmp_path / "poisoned/run")
    assert [amendment.rows for amendment in amendments] == [(7,)]
    assert len(read_plan(tmp_path / "poisoned/run").rows_reached()[1]) == 1
    # The same as if the row had been left out of the plan from that step on.
    append_amendment(tmp_path / "without/run", Amendment(0, (7,), "known before"))
    run_training(tmp_path / "without", tiny_model_folder)
    same = [run_bytes(tmp_path / name)["adapter_model.safetensors"] for name in ("poisoned", "without")]
    assert same[0] == same[1]


@pytest.mark.parametrize(("bad", "words"), [(16, ""), (17, "more than data.max_rejected allows")])
def test_as_many_rows_as_are_tolerated_are_quarantined(
    bad: int, words: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, learnable_rows(60), batch_size=20)
    chosen = read_plan(tmp_path / "run").steps[1].rows[:bad]
    poison(monkeypatch, set(chosen))
    if words:
        with pytest.raises(StepNotFinite, match=words):
            run_training(tmp_path, tiny_model_folder, on_beat=stop_after(2))
        chosen = ()
    else:
        run_training(tmp_path, tiny_model_folder, on_beat=stop_after(2))
    assert [row for amendment in read_amendments(tmp_path / "run") for row in amendment.rows] == list(chosen)


def test_a_step_that_is_not_finite_stops_before_the_update_and_names_its_rows(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, learnable_rows(60))
    rows = read_plan(tmp_path / "run").steps[3].rows
    poison(monkeypatch, set(rows))
    with pytest.raises(StepNotFinite, match="step 3: the loss is nan; every row of the step fails") as caught:
        run_training(tmp_path, tiny_model_folder)
    assert all(f"rows.jsonl:{row + 1}" in caught.value.message for row in rows)
    assert [entry["step"] for entry in metrics(tmp_path) if entry["event"] == "step"] == [1, 2, 3]


def test_a_base_model_that_is_not_finite_is_said_to_be_the_cause(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, learnable_rows(60))
    poison(monkeypatch, set(range(60)))
    with pytest.raises(StepNotFinite, match="before anything was trained: the base model") as caught:
        run_training(tmp_path, tiny_model_folder)
    assert "float32" in caught.value.hint
    assert not read_amendments(tmp_path / "run")


def test_a_run_that_changes_nothing_is_no_success(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, learnable_rows(20))
    monkeypatch.setattr(AdamW, "update", lambda *_, **__: None)
    with pytest.raises(StepNotFinite, match="what it was at the start"):
        run_training(tmp_path, tiny_model_folder)
    assert not (tmp_path / "run/adapter_model.safetensors").exists()


def test_half_precision_learns_like_float32(tiny_model_folder: Path, tmp_path: Path) -> None:
    """float16 needs its scaled gradients, bfloat16 its fp32 masters; the curve is that of float32 to two digits."""
    curves = {}
    for dtype in ("float32", "bfloat16", "float16"):
        make_run(tmp_path / dtype, learnable_rows(60), epochs=4, dtype=dtype)
        run_training(tmp_path / dtype, tiny_model_folder)
        curves[dtype] = losses(tmp_path / dtype)
    for dtype in ("bfloat16", "float16"):
        assert curves[dtype] == pytest.approx(curves["float32"], rel=0.02)


def poison(monkeypatch: pytest.MonkeyPatch, rows: set[int]) -> None:
    """Give these rows a token whose embedding is NaN."""
    load, read = session.load_model, train.read_documents

    def load_poisoned(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **{**kwargs, "choices": replace(kwargs["choices"], path="general")})
        head = model.module.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)  # not tied: only this input is NaN
        model.module.get_input_embeddings().weight[90] = torch.nan
        return model

    def read_poisoned(snapshot: Any, wanted: Any) -> list[Any]:
        documents = read(snapshot, wanted)
        for document in documents:
            if document.row in rows:
                document.tokens_L[1] = 90
        return documents

    monkeypatch.setattr(session, "load_model", load_poisoned)
    monkeypatch.setattr(train, "read_documents", read_poisoned)


def saved_steps(folder: Path) -> list[int]:
    return [entry["step"] for entry in read_journal(folder / "run/metrics.jsonl") if entry["event"] == "saved"]


def test_the_first_checkpoint_is_of_the_first_step_and_then_every_ten_minutes(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a process that resumes: each start gets on, however soon it dies. A step takes 100 s here."""
    clock = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(checkpoint, "time", fake)

    def take_100_s(heartbeat: Heartbeat, done: int) -> None:
        clock.now = 100.0 * done
        stop_after(10)(heartbeat, done)

    make_run(tmp_path, learnable_rows(200), validate_every=1000)
    run_training(tmp_path, tiny_model_folder, on_beat=take_100_s)
    assert saved_steps(tmp_path) == [1, 7, 10]  # the last one as it stops
    run_training(tmp_path, tiny_model_folder, on_beat=take_100_s)
    assert saved_steps(tmp_path)[3:] == [11, 17, 20]


def test_a_disk_that_fails_is_tried_again_later_and_stops_no_training(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, tried = checkpoints.commit_within, []

    def fail_once(run: Path, step: int, files: Any) -> Path:
        tried.append(step)
        if len(tried) == 1:
            raise OSError("the disk is gone")
        return commit(run, step, files)

    make_run(tmp_path, learnable_rows(40), epochs=1)
    monkeypatch.setattr(checkpoints, "commit_within", fail_once)
    assert run_training(tmp_path, tiny_model_folder)["status"] == "done"
    events = [entry["event"] for entry in read_journal(tmp_path / "run/metrics.jsonl")]
    assert events.count("save_failed") == 1 and tried[0] == 1 < tried[1]


def test_training_goes_on_from_an_adapter(usual_run: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    """It begins where that one ended, and resumes as any other run."""
    for name in ("whole", "cut"):
        lora = {"r": 4, "alpha": 8, "start": str(usual_run / "run")}
        make_run(tmp_path / name, learnable_rows(60), lora=lora, learning_rate=1e-3)
    run_training(tmp_path / "whole", tiny_model_folder)
    before, after = losses(usual_run), losses(tmp_path / "whole")
    assert after[0] < 0.9 * before[0] and min(after) < min(before)
    run_training(tmp_path / "cut", tiny_model_folder, on_beat=stop_after(3))
    run_training(tmp_path / "cut", tiny_model_folder)
    assert run_bytes(tmp_path / "cut") == run_bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("lora", "words"),
    [({"r": 4, "alpha": 32}, "is scaled by 2"), ({"r": 8, "alpha": 16}, "has the shape"), ({}, "no adapter in")],
)
def test_an_adapter_of_another_scale_or_rank_is_refused(
    lora: dict[str, int], words: str, usual_run: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    start = usual_run / "run" if lora else tmp_path / "missing"
    make_run(tmp_path, learnable_rows(60), lora={**lora, "start": str(start)})
    with pytest.raises(UsageError, match=words):
        run_training(tmp_path, tiny_model_folder)


def test_tensorboard_has_each_step_once_also_of_a_run_that_died(tiny_model_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path, learnable_rows(60), report_to=["tensorboard"])
    run_training(tmp_path, tiny_model_folder, on_beat=stop_after(5))
    shutil.rmtree(checkpoints.folder_of(tmp_path / "run", 5))  # as if it had died after the checkpoint before
    run_training(tmp_path, tiny_model_folder)
    shown = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    points = [(event.step, event.value) for event in shown.Scalars("train/loss")]
    assert points == [(step, pytest.approx(loss)) for step, loss in enumerate(losses(tmp_path), 1)]
