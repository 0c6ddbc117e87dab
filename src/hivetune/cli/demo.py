"""The command `demo`: all steps once on a small real model."""

import shutil
import time
from typing import Annotated

import typer

from hivetune import walk
from hivetune.base.disk import home, read_json
from hivetune.base.paths import quoted
from hivetune.cli.arguments import model_folder
from hivetune.cli.output import duration, emit, progress, say, short, show, size, table
from hivetune.cli.training import show_training, train_shown
from hivetune.cli.verdict import show_verdict
from hivetune.config import load_config
from hivetune.judge.evaluate import verdict_document, verdict_of
from hivetune.llama.backend import open_backend
from hivetune.release.export import export_run
from hivetune.release.gguf import SERVED_QUANT, find_converter
from hivetune.release.prove import describe_proof, prove_export
from hivetune.run.folder import EVALUATION
from hivetune.synth.demo import ask_some, write_inputs
from hivetune.train.open import Run
from hivetune.train.start import open_run


def demo(
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier demo and start again.")] = False,
) -> None:
    """Run every step once, in minutes, on a small real model and rows from Python's documentation."""
    started = time.monotonic()
    find_converter()  # a missing one is reported before the training
    folder = home() / "demo"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    config_path = write_inputs(folder)
    config = load_config(config_path)
    _station(1, "model", f"SmolLM2-135M-Instruct, prepared once in {home()}")
    model_folder(config.model)
    _station(2, "data", f"{config.data.path}: three agents answering questions about the standard library")
    with progress("checking and tokenizing", "rows") as report:
        run = open_run(config, "demo", report)
    _show_data(run)
    _station(3, "training", f"{len(run.plan.steps)} steps of {config.batch_size} examples, rank {config.lora.r}")
    summary = train_shown(run)
    show_training(summary)
    _station(4, "evaluation", "base and tuned model on rows that were not used in training")
    if (run.folder / EVALUATION).exists():
        say("already evaluated")
        evaluation = read_json(run.folder / EVALUATION)
    else:
        with progress("scoring and answering", "items") as report:
            evaluation = walk.evaluate(run, progress=report)
    _station(5, "verdict", "from the thresholds in the config")
    verdict = verdict_of(evaluation)
    show_verdict(verdict)
    _station(6, "export", "a GGUF file, and its answers from llama.cpp")
    exported = export_run(run.folder, "gguf", quant=SERVED_QUANT)
    say(f"{exported.path}: {size(exported.path.stat().st_size)}")
    with progress("checking the export") as report:
        say(f"checked: {describe_proof(prove_export(run.folder, exported, report))}")
    with open_backend(exported.path) as backend:
        answers = ask_some(run, evaluation, backend)
    show("\nThree held-out prompts:")
    for answer in answers:
        show(f"\n  {answer['prompt']}\n    base:  {short(answer['base'])}\n    tuned: {short(answer['tuned'])}")
    show("\nWhat to do next:")
    for command, reason in (
        (f"hivetune chat {quoted(exported.path)}", "talk to it"),
        (f"hivetune show {quoted(run.folder)}", "see the run"),
        ("hivetune check YOUR.jsonl --model smollm2-135m", "look at your own rows"),
        (f"cp {quoted(config_path)} my.yaml", "change data.path to your own rows, then: hivetune train my.yaml"),
    ):
        show(f"  {command}    # {reason}")
    say(f"all of it took {duration(time.monotonic() - started)}")
    gate = verdict_document(verdict)
    emit({"run": run.folder, "train": summary, "gate": gate, "gguf": exported.path, "answers": answers})


def _station(number: int, name: str, text: str) -> None:
    show(f"\n{number}. {name}: {text}")


def _show_data(run: Run) -> None:
    counts = run.snapshot.manifest["accounting"]
    rejected, set_aside = counts["rejected"], counts["set_aside"]
    splits = {split: len(run.snapshot.rows(split)) for split in ("train", "validation", "test")}
    show(
        f"{counts['rows_in']} rows in = {splits['train']} to train on + {splits['validation']} to choose the best step "
        f"+ {splits['test']} for the verdict + {counts['duplicates']} duplicates + {sum(rejected.values())} rejected + "
        f"{sum(set_aside.values())} set aside"
    )
    reasons = [("rejected", reason, count) for reason, count in rejected.items()]
    reasons += [("set aside", reason, count) for reason, count in set_aside.items()]
    table("", ("what", "reason", "rows"), reasons)
