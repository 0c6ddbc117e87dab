"""The commands `train` (one run under the supervisor) and `bench` (runs of a config, repeated and over a grid)."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from hivetune.base.disk import home, scratch_folder, write_json
from hivetune.base.paths import spelled
from hivetune.cli.arguments import (
    ColumnsOption,
    ConfigArgument,
    IgnoreOption,
    ModelOption,
    SetOption,
    complete_setting,
    model_folder,
    read_settings,
)
from hivetune.cli.output import AFTER_ROWS, Note, Table, answer, duration, number, progress, say, show_unit, size
from hivetune.config import RunConfig, override_config
from hivetune.data.files.find import find_sources, names_rows
from hivetune.errors import Busy, DoesNotFit, HivetuneError, RecoveryExhausted, UsageError
from hivetune.process.detach import start_detached, systemd_unit
from hivetune.release.prove import ensure_base_served
from hivetune.run.checkpoints import steps
from hivetune.run.figures import missing_tools
from hivetune.run.folder import RECORD, read_resolved
from hivetune.run.status import find_run, newest_losses, shortest_name
from hivetune.train.open import Run, load_run
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms
from hivetune.train.supervise.ladder import ArithmeticChange

# What an existing run may change: where and how carefully it works.
CHANGEABLE = ("report_to=", "memory_share=", "allow=")
WAIT_S = 2.0


def train(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    detach: Annotated[bool, Option("--detach", help="Train in the background.")] = False,
    unit: Annotated[bool, Option("--unit", help="Only print a systemd user unit that continues this run.")] = False,
) -> None:
    """Train an adapter. Run the same command again to continue a run that stopped; a finished run stays as it is.

    CONFIG is a YAML file, a file of rows together with --model, or the name or folder of a run that stopped.
    """
    changes = overrides or []
    folder = find_run(config, " or config") if model is None and _names_run(config) else None
    if folder is not None and (wrong := [change for change in changes if not change.startswith(CHANGEABLE)]):
        names = ", ".join(name.rstrip("=") for name in CHANGEABLE)
        raise UsageError(f"--set {wrong[0]}: an existing run can only change {names}")
    if unit:
        if folder is None:
            raise UsageError("--unit is for a run that was started", hint="hivetune train RUN --unit")
        show_unit(systemd_unit(folder, changes), f"hivetune-{folder.name}", run=folder)
        return
    if folder is None:
        loaded, name = read_settings(config, model, changes, columns, ignore)
    run = open_configured(loaded, name) if folder is None else _continued(folder, changes)
    if detach and not run.is_finished:
        start_detached(run.folder, changes if folder is not None else ())
        follow = f"training in the background\nfollow it: hivetune show {shortest_name(run.folder)} --follow"
        answer({"run": run.folder, "status": "started"}, Note(follow))
        return
    summary = train_shown(run)
    answer(summary, *training_text(summary), f"next: hivetune eval {shortest_name(run.folder)}")


def _names_run(word: str) -> bool:
    """Return whether the argument is a run's folder, or can only be its name: no path, no file, no rows."""
    path = Path(word)
    is_path = "/" in word or path.exists() or path.suffix.lower() in (".yaml", ".yml")
    return (path / RECORD).exists() or not (is_path or names_rows(word))


def open_configured(config: RunConfig, name: str) -> Run:
    """Return the run of a config, showing progress while its model and rows are prepared."""
    find_sources(config.data.path)  # report a missing file before preparing a model
    model_folder(config.model)
    reported = False

    def wait(busy: Busy) -> None:
        nonlocal reported
        if not reported:
            say(f"{busy.message}: waiting for it to prepare the rows")
            reported = True
        time.sleep(WAIT_S)

    with progress("preparing the rows", "rows", AFTER_ROWS) as report:
        return open_run(config, name, report, wait)


def _continued(folder: Path, overrides: Sequence[str]) -> Run:
    run = load_run(folder)
    return replace(run, config=override_config(run.config, overrides))


def train_shown(run: Run) -> dict[str, Any]:
    """Train under the supervisor, showing progress, and return the document of `train --json`."""
    if run.is_finished:
        return run.summary
    for problem in missing_tools(run.config.report_to):
        say(problem)

    warn_if_not_served(run)

    def losses() -> str:
        figures = zip(("loss", "validation", "tokens/s"), newest_losses(run.folder), (3, 3, 0), strict=True)
        return ", ".join(f"{name} {number(value, digits)}" for name, value, digits in figures if value is not None)

    with progress("training", "steps") as report:
        total = len(run.plan.steps)
        summary = train_run(run, Terms(lambda done: report(done, total, losses()), on_wait=say, on_change=say))
    if reason := read_resolved(run.folder)[1].kernels_why:
        say(f"slow path: without the C++ kernels a step takes about four times as long. {reason}")
    return summary


def warn_if_not_served(run: Run) -> None:
    """Say before the first training why llama.cpp can't serve the base, whose run is then judged by its loss alone."""
    if steps(run.folder):
        return
    try:
        with progress("checking that llama.cpp serves the base") as report:
            ensure_base_served(run.config.model, run.model, report)
    except HivetuneError as error:
        say(f"without answers from llama.cpp the run is judged by its loss alone: {error.message}; {error.hint}")


TRAINED = "steps, loss first|3, loss last|3, best at step=adapter_step, tokens/s=tokens_per_second|0, "
TRAINED += "peak memory=peak_memory_bytes|size, restarts, time=train_seconds|duration"


def training_text(summary: dict[str, Any]) -> Iterator[str | Table]:
    """Yield the result of a run as people read it."""
    if summary["already_done"]:
        yield Note(f"{summary['run']} is already finished; nothing was trained")
    yield Table(TRAINED, [summary])
    by = f", {summary['kernels']} kernels" if summary["kernels"] and summary["path"] == "fast" else ""
    yield Note(f"computed in {summary['dtype']} on {summary['device']}, {summary['path']} path{by}")
    counts = {k: sum(v.values()) if isinstance(v, dict) else v for k, v in summary["rows"].items()}
    yield Note("rows: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()))
    if summary["storage_problem"]:
        yield Note(f"disk: {summary['storage_problem']}")
    yield from (Note(f"quarantined: {row}") for row in summary["quarantined"])
    if changes := summary["arithmetic_changes"]:
        yield Note("recovery changed the arithmetic, so this adapter differs in rounding from an undisturbed run:")
        yield from (Note(f"  {ArithmeticChange(**change).words}") for change in changes)


# bench

FIGURES = ("train_seconds", "samples_per_second", "tokens_per_second", "loss_first", "loss_last", "validation_loss",
           "peak_memory_bytes")  # fmt: skip
FACTS = ("steps", "trained_tokens", "device", "dtype", "path", "restarts")
BENCHED = "settings, time, samples/s, tokens/s, last loss, validation loss, peak memory"


def bench(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    over: Annotated[
        list[str] | None,
        Option(metavar="KEY=A,B", help="Run once per value of this setting.", autocompletion=complete_setting),
    ] = None,
    repeat: Annotated[int, Option(min=1, help="Runs of each combination, each with a seed of its own.")] = 1,
    out: Annotated[Path | None, Option(help="Write the figures to this JSON file too.")] = None,
) -> None:
    """Measure time, memory, throughput and losses of a config: repeated, and over every combination of settings.

    For example --over batch_size=4,8,16 --set max_steps=50, or --over lora.r=8,32 --repeat 3. The runs are deleted.
    """
    loaded, name = read_settings(config, model, overrides or [], columns, ignore)
    grid = combinations(over or ())
    planned = [override_config(loaded, settings, "--over") for settings in grid]  # a wrong value is refused first
    lines = []
    with scratch_folder(home() / "bench") as folder:
        for place, (settings, changed) in enumerate(zip(grid, planned, strict=True)):
            runs = []
            for repetition in range(repeat):
                say(f"{' '.join(settings) or name}, {repetition + 1} of {repeat}")
                update = {"output": str(folder / f"{place}-{repetition}"), "seed": changed.seed + repetition}
                runs.append(_measured(changed.model_copy(update=update), name))
            lines.append({"settings": settings, "runs": runs, "figures": summary(runs)})
    document = {"config": config, "repeat": repeat, "combinations": lines}
    if out is not None:
        write_json(out, document)
    written = "" if out is None else f"written: {spelled(out)}"
    answer(document, Table(BENCHED, [_bench_cells(line) for line in lines]), written)


def combinations(over: Sequence[str]) -> list[list[str]]:
    """Return every combination of `KEY=A,B` as overrides; one without any for an empty grid. Raises UsageError."""
    axes = []
    for text in over:
        key, equals, values = text.partition("=")
        if not equals or not key or not all(values.split(",")):
            raise UsageError(f"--over {text}: not of the form KEY=A,B", hint="for example --over lora.r=8,16")
        axes.append([f"{key}={value}" for value in values.split(",")])
    return [list(settings) for settings in itertools.product(*axes)]


def _measured(config: RunConfig, name: str) -> dict[str, Any]:
    """Train one run, and return its figures, or why it has none: a combination may not fit."""
    try:
        found = train_shown(open_configured(config, name))
    except (DoesNotFit, RecoveryExhausted) as error:
        say(f"no figures: {error.message}")
        return {"seed": config.seed, "error": error.message}
    found["validation_loss"] = (found["best"] or {}).get("loss")
    return {"seed": config.seed, **{key: found[key] for key in (*FACTS, *FIGURES)}}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return mean and standard deviation of each figure; None where no run has it, or only one."""
    figures = {}
    for key in FIGURES:
        values = [run[key] for run in runs if run.get(key) is not None]
        mean = statistics.fmean(values) if values else None
        figures[key] = {"mean": mean, "sd": statistics.stdev(values) if len(values) > 1 else None}
    return figures


def _bench_cells(line: Mapping[str, Any]) -> tuple[str | None, ...]:
    figures = line["figures"]
    failed = sum("error" in run for run in line["runs"])

    def cell(key: str, shown: Callable[[float], str]) -> str | None:
        mean, sd = figures[key]["mean"], figures[key]["sd"]
        return None if mean is None else shown(mean) + ("" if sd is None else f" ± {shown(sd)}")

    named = " ".join(line["settings"]) or "as given"
    return (
        f"{named} ({failed} failed)" if failed else named,
        cell("train_seconds", duration),
        cell("samples_per_second", "{:.2f}".format),
        cell("tokens_per_second", "{:.0f}".format),
        cell("loss_last", number),
        cell("validation_loss", number),
        cell("peak_memory_bytes", size),
    )
