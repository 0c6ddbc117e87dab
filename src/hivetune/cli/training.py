"""A run is opened and trained for people: its bars, what they are told before it, what came out."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hivetune.base.packages import install_command
from hivetune.cli.model import model_folder
from hivetune.cli.output import AFTER_ROWS, duration, number, progress, say, size, table
from hivetune.config import RunConfig
from hivetune.dashboard.exporters.follow import what_is_missing
from hivetune.data.intake.files import find_sources
from hivetune.errors import Busy
from hivetune.process.launch import Ahead
from hivetune.release.dry_export import DryExport, dry_export
from hivetune.run.choices import read_resolved
from hivetune.run.folder import LOSS_CURVE
from hivetune.run.status import newest_losses
from hivetune.train.open import Run, open_run
from hivetune.train.probe import probe_run, proof_is_due, prove_again
from hivetune.train.start import train_run
from hivetune.train.supervise.attempt import Terms
from hivetune.train.supervise.ladder import ArithmeticChange

WAIT_S = 2.0


def open_configured(config: RunConfig, name: str) -> Run:
    """The run of a config, with a bar for its model and one for its rows."""
    find_sources(config.data.path)  # a name that is nothing is said before a model is prepared
    model_folder(config.model)
    with progress("preparing the rows", "rows", AFTER_ROWS) as report:
        return open_run(config, name, report, _waiting())


def _waiting() -> Callable[[Busy], None]:
    """Says once for whom it waits."""
    told = False

    def wait(busy: Busy) -> None:
        nonlocal told
        if not told:
            say(f"{busy.message}: waiting until it has prepared the rows")
            told = True
        time.sleep(WAIT_S)

    return wait


def measure_and_train(run: Run, ahead: Ahead) -> dict[str, Any]:
    """Train under the supervisor, with a bar; returns the document of `train --json`. `ahead`: may have a child that
    imports already."""
    total = len(run.plan.steps)
    for target in run.config.report_to:
        if problem := what_is_missing(target):
            say(f"{problem}: {install_command(target)}; training goes on without it")
    if proof_is_due(run):
        say("driver, torch or card changed since this machine was proven: it is proven again, about a minute, once")
        with progress("proving again that this machine computes right") as report:
            proven = prove_again(run, report)
        say(proven)
    tried: list[DryExport] = []

    def meanwhile() -> None:
        if run.record["status"] != "done":
            ahead.start()  # the training's worker imports while the probe compares itself
            tried.append(dry_export(run))

    with progress("two measured steps on this machine, to choose precision and micro-batch") as report:
        variables = probe_run(run, report, meanwhile, ahead.launch)
    for one in tried:
        say(f"exports: {what_can_be_exported(one)}")
    for variable in variables:
        say(f"for the worker: {variable.words}")
    if why := read_resolved(run.folder)[1].kernels_why:
        say(f"the slow path: a step takes about four times as long by torch alone as by the C++ kernels. {why}")
    with progress("training", "steps") as report:
        return train_run(run, Terms(lambda done: report(done, total, _losses(run.folder)), start=ahead.launch))


def _losses(run: Path) -> str:
    loss, validation, speed = newest_losses(run)
    told = (("loss", loss, 3), ("validation", validation, 3), ("tokens/s", speed, 0))
    return ", ".join(f"{name} {number(value, digits)}" for name, value, digits in told if value is not None)


def what_can_be_exported(tried: DryExport) -> str:
    """Said before the time is spent, so that no run ends in an export error."""
    if tried.unwritten:
        why = f"GGUF (--to gguf, gguf-adapter, ollama; serve, chat) will not: {tried.unwritten}"
        return f"--to adapter and --to merged will work; {why}"
    if tried.unserved:
        return f"all can be written; as GGUF llama.cpp does not serve it here: {tried.unserved}"
    said = f"{tried.conversations} conversations have the token ids that are trained"
    return f"tried with a small model: llama.cpp computes it as it is trained, {said}"


def show_training(summary: dict[str, Any]) -> None:
    """What the run came to, for people."""
    if summary["already_done"]:
        say(f"{summary['run']} was finished before; nothing was trained")
    rows = summary["rows"]
    speed = summary["tokens_per_second"]
    table(
        "",
        ("steps", "loss first", "loss last", "best at step", "tokens/s", "peak memory", "restarts", "time"),
        [
            (
                summary["steps"],
                number(summary["loss_first"]),
                number(summary["loss_last"]),
                summary["adapter_step"],
                number(speed, 0),
                size(summary["peak_memory_bytes"]),
                summary["restarts"],
                duration(summary["train_seconds"]),
            )
        ],
    )
    if summary.get("dtype"):  # a run of an older version did not tell
        by = f", {summary['kernels']} kernels" if summary.get("kernels") and summary["path"] == "fast" else ""
        say(f"computed in {summary['dtype']} on {summary['device']}, {summary['path']} path{by}")
    parts = [f"{name.replace('_', ' ')} {count}" for name, count in rows.items() if isinstance(count, int)]
    parts += [
        f"{name.replace('_', ' ')} {sum(counts.values())}" for name, counts in rows.items() if isinstance(counts, dict)
    ]
    say("rows: " + ", ".join(parts))
    if summary.get("storage_problem"):
        say(f"the disk: {summary['storage_problem']}")
    for place in summary["quarantined"]:
        say(f"quarantined: {place}")
    if changes := summary.get("arithmetic_changes"):
        say("arithmetic changed, so this adapter differs in rounding from that of an undisturbed run:")
        for change in changes:
            say(f"  {ArithmeticChange(**change).words}")
    say(f"loss curve: {Path(summary['run']) / LOSS_CURVE}")
