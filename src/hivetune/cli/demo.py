"""The command `demo`: all steps once on a small real model."""

import shutil
import time
from typing import Annotated

from typer import Option

from hivetune import walk
from hivetune.base.disk import home, read_json
from hivetune.base.paths import quoted
from hivetune.cli.arguments import model_folder
from hivetune.cli.judge import verdict_text
from hivetune.cli.output import Note, Table, answer, duration, present, progress, say, short, show, size
from hivetune.cli.train import train_shown, training_text
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


def demo(fresh: Annotated[bool, Option("--fresh", help="Delete an earlier demo and start again.")] = False) -> None:
    """Run every step once, in minutes, on a small real model and rows from Python's documentation."""
    started = time.monotonic()
    find_converter()  # a missing one is reported before the training
    folder = home() / "demo"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    config_path = write_inputs(folder)
    config = load_config(config_path)
    show(f"\n1. model: SmolLM2-135M-Instruct, prepared once in {home()}")
    model_folder(config.model)
    show(f"\n2. data: {config.data.path}: three agents answering questions about the standard library")
    with progress("checking and tokenizing", "rows") as report:
        run = open_run(config, "demo", report)
    present(*_rows_text(run))
    show(f"\n3. training: {len(run.plan.steps)} steps of {config.batch_size} examples, rank {config.lora.r}")
    summary = train_shown(run)
    present(*training_text(summary))
    show("\n4. evaluation: base and tuned model on rows that were not used in training")
    if (run.folder / EVALUATION).exists():
        say("already evaluated")
        evaluation = read_json(run.folder / EVALUATION)
    else:
        with progress("scoring and answering", "items") as report:
            evaluation = walk.evaluate(run, progress=report)
    show("\n5. verdict: from the thresholds in the config")
    verdict = verdict_of(evaluation)
    present(*verdict_text(verdict))
    show("\n6. export: a GGUF file, and its answers from llama.cpp")
    exported = export_run(run.folder, "gguf", quant=SERVED_QUANT)
    say(f"{exported.path}: {size(exported.path.stat().st_size)}")
    with progress("checking the export") as report:
        say(f"checked: {describe_proof(prove_export(run.folder, exported, report))}")
    with open_backend(exported.path) as backend:
        answers = ask_some(run, evaluation, backend)
    lines = ["\nThree held-out prompts:"]
    for each in answers:
        lines.append(f"\n  {each['prompt']}\n    base:  {short(each['base'])}\n    tuned: {short(each['tuned'])}")
    lines += [
        "\nWhat to do next:",
        f"  hivetune chat {quoted(exported.path)}    # talk to it",
        f"  hivetune show {quoted(run.folder)}    # see the run",
        "  hivetune check YOUR.jsonl --model smollm2-135m    # look at your own rows",
        f"  cp {quoted(config_path)} my.yaml    # change data.path to your own rows, then: hivetune train my.yaml",
    ]
    gate = verdict_document(verdict)
    document = {"run": run.folder, "train": summary, "gate": gate, "gguf": exported.path, "answers": answers}
    answer(document, *lines, Note(f"all of it took {duration(time.monotonic() - started)}"))


def _rows_text(run: Run) -> tuple[str | Table, ...]:
    counts = run.snapshot.manifest["accounting"]
    splits = {split: len(run.snapshot.rows(split)) for split in ("train", "validation", "test")}
    lost = [(kind.replace("_", " "), reason, count)
            for kind in ("rejected", "set_aside") for reason, count in counts[kind].items()]  # fmt: skip
    rejected, set_aside = (sum(counts[kind].values()) for kind in ("rejected", "set_aside"))
    sums = (
        f"{counts['rows_in']} rows in = {splits['train']} to train on + {splits['validation']} to choose the best step "
        f"+ {splits['test']} for the verdict + {counts['duplicates']} duplicates + {rejected} rejected + "
        f"{set_aside} set aside"
    )
    return (sums, Table("what, reason, rows", lost)) if lost else (sums,)
