"""The commands `resume`, `verify-resume`, `learn` and `sweep`, and what all commands that train share.

A sweep trains several settings of one config and judges the best.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune import walk
from hivetune.base.disk import home, scratch_folder
from hivetune.base.paths import install_command, quoted
from hivetune.cli.arguments import (
    ColumnsOption,
    ConfigArgument,
    ModelOption,
    RunArgument,
    SetOption,
    complete_setting,
    model_folder,
    read_settings,
)
from hivetune.cli.data import learning_text
from hivetune.cli.output import AFTER_ROWS, duration, emit, number, parts, progress, say, show, show_unit, size, table
from hivetune.cli.verdict import show_metrics
from hivetune.cluster.carry import carry_run
from hivetune.config import RunConfig, override_config
from hivetune.dashboard.exporters.follow import exporter_problem
from hivetune.data.intake.files import find_sources
from hivetune.data.prepare.prepare import prepare_data
from hivetune.errors import Busy, NotDeployed, UsageError
from hivetune.learn import learn as learn_in_stages
from hivetune.process.detach import start_detached, systemd_unit
from hivetune.process.forkserver import start_ahead
from hivetune.release.dry_export import DryExport, dry_export
from hivetune.run.folder import LOSS_CURVE, read_resolved
from hivetune.run.status import find_run, newest_losses, shortest_name
from hivetune.sweep import CURVES, run_sweep
from hivetune.train.open import Run, load_run
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms
from hivetune.train.supervise.ladder import ArithmeticChange
from hivetune.train.supervise.verify import verify_resume as verify

WAIT_S = 2.0


def open_configured(config: RunConfig, name: str) -> Run:
    """Return the run of a config, showing progress while its model and rows are prepared."""
    find_sources(config.data.path)  # report a missing file before preparing a model
    model_folder(config.model)
    with progress("preparing the rows", "rows", AFTER_ROWS) as report:
        return open_run(config, name, report, _waiting())


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
    say(f"training in the background\nfollow it: hivetune watch {shortest_name(run)}")
    emit({"run": run, "status": "started"})


def measure_and_train(run: Run) -> dict[str, Any]:
    """Train under the supervisor, showing progress, and return the document of `train --json`.

    Nothing is measured for a finished run, which may lie on a disk that is only read.
    """
    if run.is_finished:
        return run.summary
    for target in run.config.report_to:
        if problem := exporter_problem(target):
            say(f"{problem}: {install_command(target)}; the run is not sent there")
    tried: list[DryExport] = []

    def meanwhile() -> None:
        tried.append(dry_export(run))

    with progress("measuring two steps to choose precision and micro-batch size") as report:
        notes = walk.measure(run, report, meanwhile)
    for dry in tried:
        say(f"exports: {exports_text(dry)}")
    for note in notes:
        say(note)
    if reason := read_resolved(run.folder)[1].kernels_why:
        say(f"slow path: without the C++ kernels a step takes about four times as long. {reason}")
    with progress("training", "steps") as report:
        total = len(run.plan.steps)
        return train_run(run, Terms(lambda done: report(done, total, _losses(run.folder)), on_wait=say))


def _losses(run: Path) -> str:
    loss, validation, speed = newest_losses(run)
    figures = (("loss", loss, 3), ("validation", validation, 3), ("tokens/s", speed, 0))
    return ", ".join(f"{name} {number(value, digits)}" for name, value, digits in figures if value is not None)


def exports_text(tried: DryExport) -> str:
    """Return a sentence on the exports that will work, to show before training."""
    if tried.unwritten:
        reason = f"GGUF (--to gguf, gguf-adapter, ollama; serve, chat) will fail: {tried.unwritten}"
        return f"--to adapter and --to merged will work; {reason}"
    if tried.unserved:
        return f"all formats can be written, but llama.cpp cannot serve the GGUF here: {tried.unserved}"
    fact = f"{tried.conversations} conversations have the same token ids as in training"
    return f"tested with a small model: llama.cpp gives the same result as training, {fact}"


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


def resume(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Override supervise.* or report_to.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Continue in the background.")] = False,
    unit: Annotated[
        bool, typer.Option("--unit", help="Print a systemd user unit that resumes the run, and do nothing else.")
    ] = False,
    on: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Use a free device of this cluster.")] = None,
) -> None:
    """Continue a run that was stopped, interrupted or failed, from its newest valid checkpoint."""
    folder = find_run(run)
    if on is not None:
        if overrides or detach or unit:
            raise UsageError("--on cannot be combined with --set, --detach or --unit")
        summary = carry_run(load_run(folder), on, say)
        show_training(summary)
        emit(summary)
        return
    for override in overrides or ():
        if not override.startswith(("supervise.", "report_to=")):
            raise UsageError(f"--set {override}: an existing run can only change supervise.* and report_to")
    if unit:
        show_unit(systemd_unit(folder, overrides or ()), f"hivetune-{folder.name}", run=folder)
        return
    opened = load_run(folder)
    if detach and not opened.is_finished:
        train_detached(folder, overrides or ())
        return
    start_ahead()
    summary = measure_and_train(replace(opened, config=override_config(opened.config, overrides or ())))
    show_training(summary)
    emit(summary)


def verify_resume(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    overrides: SetOption = None,
) -> None:
    """Train a few steps twice, kill one of the runs with SIGKILL, resume it, and compare both bit for bit."""
    loaded, _ = read_settings(config, model, overrides, columns)
    folder_of_model = model_folder(loaded.model)
    with progress("preparing data", "rows", AFTER_ROWS) as report:
        snapshot = prepare_data(loaded, folder_of_model, report)
    # The folder of temporary files may be too small for two runs with checkpoints.
    with scratch_folder(home() / "verify") as folder, progress("training", "steps") as report:
        verified = verify(loaded, folder_of_model, snapshot, folder, report)
    rows = [
        (file.file, "bit for bit" if file.identical else "no", "" if file.difference is None else file.difference)
        for file in verified.files
    ]
    table("", ("file", "equal", "largest difference"), rows)
    say(
        f"{verified.steps} steps on {verified.device}, killed {verified.kills} times, "
        f"resumed from step {', '.join(map(str, verified.resumed_from))}; {duration(verified.seconds)}"
    )
    files = [parts(file, "file", "identical", "difference") for file in verified.files]
    facts = parts(verified, "identical", "passed", "steps", "kills", "resumed_from", "device")
    emit({**facts, "files": files, "seconds": verified.seconds})
    if not verified.passed:
        say("hivetune: the killed run has other weights than the undisturbed one")
        say("hint: run it again; if they differ again, report it with the output of --json")
        raise typer.Exit(1)
    result = "equal bit for bit" if verified.identical else "equal within the rounding of this card"
    show(f"verified: killed and undisturbed run are {result}")


def learn(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    overrides: SetOption = None,
) -> None:
    """Train on good rows, then learn from pairs and failures, and keep the better of the two adapters.

    The same command continues with the first stage that is not finished.
    """
    loaded, name = read_settings(config, model, overrides or [], columns)
    find_sources(loaded.data.path)
    model_folder(loaded.model)

    with progress("comparing the stages", "items") as comparing:
        document = learn_in_stages(loaded, name, train=measure_and_train, say=say, comparing=comparing)
    show_stages(document)
    emit(document)


def show_stages(document: dict[str, Any]) -> None:
    """Show the rows of training, the result of each stage, and the stage that ships."""
    show(learning_text(document["learned_from"]) or "lessons besides good rows: none")
    names = (("stage1", "stage 1"), ("stage2", "stage 2"), ("longer", "stage 1, longer"))
    rows = [
        (label, stage["steps"], stage["adapter_step"], number(stage["loss_first"]), number(stage["loss_last"]))
        for key, label in names
        if (stage := document[key]) is not None
    ]
    columns = ("run", "steps", "adapter of step", "loss first", "loss last")
    table("", columns, rows, numeric=columns[1:])
    for rival, verdict in document["against"].items():
        show(f"stage 2 against {rival}: {verdict['verdict']}")
        show_metrics(verdict["metrics"], (rival, "stage 2"))
    for reason in document["reasons"]:
        show(f"  {reason}")
    show(f"ships: {document['ships']}", style="bold green")
    show(f"next: hivetune eval {shortest_name(Path(document['run']))}")


KEEP = ("all", "best")


def sweep(
    config: ConfigArgument,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=A,B", help="More settings to try, as in --over.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Train once per value of this setting.", autocompletion=complete_setting),
    ] = None,
    keep: Annotated[str, typer.Option(metavar="all|best", help="Keep all runs, or delete all but the best.")] = "all",
    on: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Use all devices of this cluster.")] = None,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    overrides: SetOption = None,
) -> None:
    """Train every combination of settings, one per device, and judge the best on the test rows.

    A run is stopped early once it is measurably worse than the best. Exits with 6 unless the verdict is deploy.
    """
    if keep not in KEEP:
        raise UsageError(f"--keep {keep}: must be all or best")
    loaded, name = read_settings(config, model, overrides or [], columns)
    with progress("training", "steps") as report:
        document = run_sweep(
            loaded, name, [*(over or []), *(more or [])], "best" if keep == "best" else "all", say, report, on
        )
    show_sweep(document)
    emit(document)
    if document["verdict"]["verdict"] != "deploy":
        raise typer.Exit(NotDeployed.exit_code)  # no error: the document above is the answer


def show_sweep(document: dict[str, Any]) -> None:
    if document["already_done"]:
        say(f"{document['sweep']} is already finished; nothing was trained")
    rows = [
        (
            " ".join(line["settings"]),
            line["state"],
            f"{line['steps']} of {line['steps_planned']}",
            number(line["validation_loss"]),
            _above(line["above_best"]),
            ", ".join(line.get("machines", ())),  # older versions did not record it
            line["why"],
        )
        for line in document["runs"]
    ]
    columns = ("settings", "state", "steps", "validation loss", "above the best", "machine", "why")
    table("", columns, rows, numeric=("steps", "validation loss", "above the best"))
    best, verdict = document["runs"][0], document["verdict"]
    show(f"best: {document['best']}, verdict on the test rows: {verdict['verdict']}")
    for reason in verdict["reasons"]:
        show(f"  {reason}")
    say(f"curves: {Path(document['sweep']) / CURVES}")
    show(
        f"next: hivetune export {quoted(best['run'])} --to gguf"
        if verdict["verdict"] == "deploy"
        else f"run: {best['run']}"
    )


def _above(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return ""
    interval = estimate["ci95"]
    return number(estimate["value"]) + (f" ({number(interval[0])} to {number(interval[1])})" if interval else "")
