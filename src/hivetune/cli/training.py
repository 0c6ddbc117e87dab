"""What all commands that train share."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hivetune.cli.arguments import (
    model_folder,
)
from hivetune.cli.output import AFTER_ROWS, duration, emit, number, progress, say, size, table
from hivetune.config import RunConfig, override_config
from hivetune.data.files.find import find_sources
from hivetune.errors import Busy
from hivetune.process.detach import start_detached
from hivetune.run.figures import missing_tools
from hivetune.run.folder import LOSS_CURVE, read_resolved
from hivetune.run.status import newest_losses, shortest_name
from hivetune.train.open import Run, load_run
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms
from hivetune.train.supervise.ladder import ArithmeticChange

WAIT_S = 2.0


def open_configured(config: RunConfig, name: str) -> Run:
    """Return the run of a config, showing progress while its model and rows are prepared."""
    find_sources(config.data.path)  # report a missing file before preparing a model
    model_folder(config.model)
    with progress("preparing the rows", "rows", AFTER_ROWS) as report:
        return open_run(config, name, report, _waiting())


def continued(folder: Path, overrides: Sequence[str]) -> Run:
    """Return the run of a folder with its settings changed. Raises UsageError."""
    run = load_run(folder)
    return replace(run, config=override_config(run.config, overrides))


def _waiting() -> Callable[[Busy], None]:
    """Return a callback that waits, and reports once the reason."""
    reported = False

    def wait(busy: Busy) -> None:
        nonlocal reported
        if not reported:
            say(f"{busy.message}: waiting for it to prepare the rows")
            reported = True
        time.sleep(WAIT_S)

    return wait


def train_detached(run: Path, overrides: Sequence[str] = ()) -> None:
    """Train a run in the background."""
    start_detached(run, overrides)
    say(f"training in the background\nfollow it: hivetune show {shortest_name(run)} --follow")
    emit({"run": run, "status": "started"})


def train_shown(run: Run) -> dict[str, Any]:
    """Train under the supervisor, showing progress, and return the document of `train --json`."""
    if run.is_finished:
        return run.summary
    for problem in missing_tools(run.config.report_to):
        say(problem)
    with progress("training", "steps") as report:
        total = len(run.plan.steps)
        terms = Terms(lambda done: report(done, total, _losses(run.folder)), on_wait=say, on_change=say)
        summary = train_run(run, terms)
    if reason := read_resolved(run.folder)[1].kernels_why:
        say(f"slow path: without the C++ kernels a step takes about four times as long. {reason}")
    return summary


def _losses(run: Path) -> str:
    loss, validation, speed = newest_losses(run)
    figures = (("loss", loss, 3), ("validation", validation, 3), ("tokens/s", speed, 0))
    return ", ".join(f"{name} {number(value, digits)}" for name, value, digits in figures if value is not None)


def show_training(summary: dict[str, Any]) -> None:
    """Show the result of a run."""
    if summary["already_done"]:
        say(f"{summary['run']} is already finished; nothing was trained")
    losses = (number(summary["loss_first"]), number(summary["loss_last"]))
    speed, memory = number(summary["tokens_per_second"], 0), size(summary["peak_memory_bytes"])
    ends = (summary["restarts"], duration(summary["train_seconds"]))
    columns = ("steps", "loss first", "loss last", "best at step", "tokens/s", "peak memory", "restarts", "time")
    table("", columns, [(summary["steps"], *losses, summary["adapter_step"], speed, memory, *ends)])
    if summary.get("dtype"):  # older versions did not record it
        by = f", {summary['kernels']} kernels" if summary.get("kernels") and summary["path"] == "fast" else ""
        say(f"computed in {summary['dtype']} on {summary['device']}, {summary['path']} path{by}")
    rows = summary["rows"]
    counts = {name: count for name, count in rows.items() if isinstance(count, int)}
    counts |= {name: sum(reasons.values()) for name, reasons in rows.items() if isinstance(reasons, dict)}
    say("rows: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()))
    if summary.get("storage_problem"):
        say(f"disk: {summary['storage_problem']}")
    for row in summary["quarantined"]:
        say(f"quarantined: {row}")
    if changes := summary.get("arithmetic_changes"):
        say("recovery changed the arithmetic, so this adapter differs in rounding from an undisturbed run:")
        for change in changes:
            say(f"  {ArithmeticChange(**change).words}")
    say(f"loss curve: {Path(summary['run']) / LOSS_CURVE}")
