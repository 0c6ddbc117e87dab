"""`hivetune demo`: the whole walk on a real model and real text, told station by station."""

import shutil
import textwrap
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.disk import home, read_json
from hivetune.cli.judge import show_verdict
from hivetune.cli.model import model_folder
from hivetune.cli.output import duration, emit, progress, say, show, size, table
from hivetune.cli.training import measure_and_train, show_training
from hivetune.config import load_config
from hivetune.judge.evaluate_run import evaluate_run
from hivetune.judge.verdict import judge_run, verdict_document
from hivetune.llama.backend import open_backend
from hivetune.process.launch import Ahead
from hivetune.release.export import export_run
from hivetune.release.gguf import SERVED_QUANT
from hivetune.release.prove import describe_proof, prove_export
from hivetune.run.folder import EVALUATION
from hivetune.synth.demo.station import ask_some, write_inputs
from hivetune.train.open import Run, open_run

ANSWER_CHARS = 160


def demo(
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier demo and train again.")] = False,
) -> None:
    """Interactions from Python's documentation, a small real model, a verdict and a chat answer, in minutes."""
    started = time.monotonic()
    folder = home() / "demo"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    config_path = write_inputs(folder)
    config = load_config(config_path)
    _station(1, "model", f"SmolLM2-135M-Instruct, prepared once below {home()}")
    model_folder(config.model)
    _station(2, "data", f"{config.data.path}: three agents answering questions about the standard library")
    with Ahead() as ahead:
        ahead.start()
        with progress("checking and tokenising", "rows") as report:
            run = open_run(config, "demo", report)
        _show_data(run)
        _station(3, "training", f"{len(run.plan.steps)} steps of {config.batch_size} examples, rank {config.lora.r}")
        summary = measure_and_train(run, ahead)
    show_training(summary)
    _station(4, "evaluation", "base and tuned model on rows that neither training nor its stopping has seen")
    evaluation = _evaluate(run)
    _station(5, "verdict", "by the thresholds of the config")
    verdict = judge_run(run)
    show_verdict(verdict)
    _station(6, "export", "GGUF, and its answers from llama.cpp")
    exported = export_run(run.folder, "gguf", quant=SERVED_QUANT)
    say(f"{exported.path}: {size(exported.path.stat().st_size)}")
    with progress("proving the export") as report:
        say(f"proof: {describe_proof(prove_export(run.folder, exported, report))}")
    answers = _answers(run, evaluation, exported.path)
    _next_steps(config_path, run.folder, exported.path)
    say(f"the walk took {duration(time.monotonic() - started)}")
    document = verdict_document(verdict)
    emit({"run": str(run.folder), "train": summary, "gate": document, "gguf": str(exported.path), "answers": answers})


def _station(number: int, name: str, text: str) -> None:
    show(f"\n{number}. {name}: {text}")


def _show_data(run: Run) -> None:
    taken = run.snapshot.manifest["accounting"]
    rejected, set_aside = taken["rejected"], taken["set_aside"]
    splits = {split: len(run.snapshot.rows(split)) for split in ("train", "validation", "test")}
    show(
        f"{taken['rows_in']} rows in = {splits['train']} to train on + {splits['validation']} to choose the best step "
        f"+ {splits['test']} for the verdict + {taken['duplicates']} duplicates + {sum(rejected.values())} rejected + "
        f"{sum(set_aside.values())} set aside"
    )
    reasons = [("rejected", reason, count) for reason, count in rejected.items()]
    reasons += [("set aside", reason, count) for reason, count in set_aside.items()]
    table("", ("what", "reason", "rows"), reasons, numeric=("rows",))


def _evaluate(run: Run) -> dict[str, Any]:
    path = run.folder / EVALUATION
    if path.exists():
        say("already evaluated")
        return read_json(path)
    with progress("scoring and answering", "items") as report:
        return evaluate_run(run, report)


def _answers(run: Run, evaluation: dict[str, Any], gguf: Path) -> list[dict[str, str]]:
    """A few answers of the exported file, for people to read."""
    with open_backend(gguf) as backend:
        found = ask_some(run, evaluation, backend)
    show("\nThree held-out prompts:")
    for answers in found:
        show(f"\n  {answers['prompt']}")
        show(f"    base:  {_one_line(answers['base'])}")
        show(f"    tuned: {_one_line(answers['tuned'])}")
    return found


def _one_line(text: str) -> str:
    return textwrap.shorten(text, ANSWER_CHARS, placeholder=" ...")


def _next_steps(config: Path, run: Path, gguf: Path) -> None:
    show("\nWhat to do next:")
    for command, why in (
        (f"hivetune chat {gguf}", "talk to it"),
        (f"hivetune show {run}", "see the run"),
        ("hivetune data check YOUR.jsonl --model smollm2-135m", "look at your own rows"),
        (f"cp {config} my.yaml", "change data.path to your own rows, then: hivetune train my.yaml"),
    ):
        show(f"  {command}    # {why}")
