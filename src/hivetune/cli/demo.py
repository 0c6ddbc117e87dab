"""The commands `demo` (all steps once on a small real model) and `bench` (a training step, timed)."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import hivetune
from hivetune import walk
from hivetune.base.disk import home, read_json
from hivetune.base.paths import install_command, quoted
from hivetune.cli.arguments import model_folder
from hivetune.cli.output import duration, emit, number, progress, say, short, show, size, table
from hivetune.cli.training import measure_and_train, show_training
from hivetune.cli.verdict import show_verdict
from hivetune.config import load_config
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge.gate import verdict_document
from hivetune.llama.backend import open_backend
from hivetune.process.forkserver import start_ahead
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
    start_ahead()
    model_folder(config.model)
    _station(2, "data", f"{config.data.path}: three agents answering questions about the standard library")
    with progress("checking and tokenizing", "rows") as report:
        run = open_run(config, "demo", report)
    _show_data(run)
    _station(3, "training", f"{len(run.plan.steps)} steps of {config.batch_size} examples, rank {config.lora.r}")
    summary = measure_and_train(run)
    show_training(summary)
    _station(4, "evaluation", "base and tuned model on rows that were not used in training")
    if (run.folder / EVALUATION).exists():
        say("already evaluated")
        evaluation = read_json(run.folder / EVALUATION)
    else:
        with progress("scoring and answering", "items") as report:
            evaluation = walk.evaluate(run, progress=report)
    _station(5, "verdict", "from the thresholds in the config")
    verdict = walk.gate(run)
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
    table("", ("what", "reason", "rows"), reasons, numeric=("rows",))


HARNESS = Path(hivetune.__file__).resolve().parents[2] / "bench" / "train_step.py"
OWN_ROWS = ("limit", "hivetune")
SETS = ("short", "agents", "long", "prefix")  # of the harness


def bench(
    peers: Annotated[bool, typer.Option(help="Also time TRL and transformers + PEFT, each in its own environment.")] = (
        False
    ),
    sets: Annotated[str, typer.Option(help="Kinds of rows to time: short, agents, long, prefix.")] = "short,agents",
    out: Annotated[
        Path | None, typer.Option(help="Write the figures to this JSON file, with a table and a plot next to it.")
    ] = None,
) -> None:
    """Time a training step on this machine, or measure models on standard tasks.

    Shows seconds, tokens and memory. --peers installs other trainers and times them too.
    """
    if unknown := set(sets.split(",")) - set(SETS):
        raise UsageError(f"unknown --sets {sorted(unknown)[0]}", hint=f"choose some of {', '.join(SETS)}")
    if not HARNESS.exists():
        raise MachineNotFit(
            "the benchmark is not part of the installed package", hint="run it in a clone of the repository"
        )
    if find_spec("torch") is None:
        raise MachineNotFit("the package torch is not installed", hint=install_command("train"))
    with tempfile.TemporaryDirectory() as folder:
        target = out or Path(folder) / "bench.json"
        command = [sys.executable, str(HARNESS), "--out", str(target), "--sets", sets]
        if not peers:
            command += ["--rows", ",".join(OWN_ROWS)]
        code = _run(command, Path(folder))
        if code != 0:
            raise HivetuneError(f"the benchmark failed with exit code {code}", hint="see its output above")
        document: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    for name in dict.fromkeys(line["set"] for line in document["summary"]):
        _show_set(name, [line for line in document["summary"] if line["set"] == name])
    if out:
        say(f"written: {out}, {out.with_suffix('.md').name}, {out.with_suffix('.svg').name}")
    emit({key: document[key] for key in ("machine", "model", "data", "rows", "summary", "seconds")})


def _run(command: list[str], folder: Path) -> int:
    """Run the benchmark and return its exit code.

    However this process is stopped, the benchmark ends, and half-installed environments of peers are deleted.
    """
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for peer in (home() / "bench").glob("peer-*"):
            if not (peer / ".ready").exists():
                shutil.rmtree(peer, ignore_errors=True)


def _show_set(name: str, lines: list[dict[str, Any]]) -> None:
    figures = ("s/step", "tokens/s", "of the limit", "memory above weights")
    rows = []
    for line in lines:
        cells = (f"void: {'; '.join(line['void'])}", "", "", "", "")
        if not line["void"]:
            cells = (
                number(line["step_s"], 2),
                f"{line['tokens_per_s']:,.0f}",
                f"{100 * line['share_of_limit']['median']:.0f} %" if "share_of_limit" in line else "-",
                size(line["peak_above_bytes"]) if "peak_above_bytes" in line else "-",
                duration(line["job_s"]),
            )
        rows.append((line["row"], line["dtype"], *cells))
    table(name, ("row", "precision", *figures, "1,500 x 3 (projected)"), rows, numeric=figures)
