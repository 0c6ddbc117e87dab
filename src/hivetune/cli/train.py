"""The commands around a training: `plan`, `train`, `stop`, and `bench` (runs of a config, repeated and over a grid)."""

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from hivetune.base.disk import home, lock_holder, scratch_folder
from hivetune.base.paths import quoted
from hivetune.base.private import check_owner, open_plain
from hivetune.base.typed import to_plain
from hivetune.base.units import step_time
from hivetune.cli import arguments
from hivetune.cli.arguments import ColumnsOption, ConfigArgument, IgnoreOption, ModelOption, RunArgument, SetOption
from hivetune.cli.output import Note, Table, answer, duration, facts, number, progress, say, size
from hivetune.config import RunConfig, override_config
from hivetune.data.files.find import find_sources, names_rows
from hivetune.errors import Busy, DoesNotFit, HivetuneError, RecoveryExhausted, UsageError
from hivetune.machine.findings import llama_build_problem
from hivetune.machine.inventory import disk_free_bytes, read_cards
from hivetune.machine.look import look
from hivetune.process.launch import supervision
from hivetune.release.prove import unserved_base
from hivetune.run.figures import missing_tools
from hivetune.run.folder import RECORD, SUPERVISOR_LOG, read_resolved
from hivetune.run.status import find_run, newest_losses, run_status, shortest_name, stop_run
from hivetune.train.open import Run, check_disk, load_run
from hivetune.train.plan.memory import explain_memory
from hivetune.train.plan.run import Planned, plan_document, plan_run
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms

# What an existing run may change: where and how carefully it works.
CHANGEABLE = ("report_to=", "memory_share=", "allow=")
WAIT_S = 2.0  # preparing rows takes minutes

ROWS_HELP = "Number of training rows; default: the number in the files."
TOKENS_HELP = "Mean tokens of a row; default: estimated from the files."
MODELS_HELP = "Plan for this model; give it several times to compare models."
MEMORY_HELP = "Memory in GB of a --card that comes in several sizes."


def plan(
    config: ConfigArgument,
    model: Annotated[list[str] | None, Option("--model", "-m", metavar="M", help=MODELS_HELP)] = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    card: Annotated[str | None, Option(help="Plan for another card or CPU, such as R9700, H200, zen4 or avx2.")] = None,
    cores: Annotated[int | None, Option(min=1, help="Number of cores; only with --card of a CPU.")] = None,
    memory: Annotated[float | None, Option(min=0.1, help=MEMORY_HELP)] = None,
    rows: Annotated[int | None, Option(min=1, help=ROWS_HELP)] = None,
    tokens: Annotated[int | None, Option(min=1, help=TOKENS_HELP)] = None,
) -> None:
    """Predict a run's memory, time and disk use, and list alternatives that fit. Does not require torch."""
    if card is None and (cores is not None or memory is not None):
        hint = "for example --card zen4"
        raise UsageError("--cores and --memory describe another machine: give --card too", hint=hint)
    plans, changes = [], [*(overrides or ()), *arguments.as_overrides(columns, ignore)]
    for name in model or ("",):
        named = [*changes, f"model={name}"] if name else changes
        loaded, _ = arguments.read_settings(config, None, named)
        plans.append(plan_run(loaded, card=card, cores=cores, memory_gb=memory, rows=rows, tokens=tokens))
    documents = [plan_document(each) for each in plans]
    if len(plans) > 1:
        lines = []
        for each in documents:
            peak_bytes = each.get("memory", {}).get("peak_bytes")
            lines.append({**each, "peak_bytes": peak_bytes, "disk_bytes": sum(each["disk_bytes"].values())})
        answer({"plans": documents}, Table("model fits peak_bytes hours disk_bytes", lines))
        return
    (planned,), (document,) = plans, documents
    error: HivetuneError | None = planned.refusal
    if error is None and card is None:
        try:
            check_disk(_folder_of(planned), planned.setup)
        except DoesNotFit as full:
            error, document = full, {**document, "fits": False, "refusal": full.message}
    elsewhere = llama_build_problem(look()) if card is None and read_cards() else ""
    if elsewhere:
        from hivetune.judge.answers import minutes_text  # 0.2 s, which every training would pay

        elsewhere += minutes_text(planned.config.model, planned.config.eval)
    answer(document, *plan_text(planned, document), Note(elsewhere), error=error)


def _folder_of(planned: Planned) -> Path:
    return Path(planned.config.output) if planned.config.output else home()


def plan_text(planned: Planned, document: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yield the chosen form of the steps, the parts of the memory, the time and the disk space as lines and tables."""
    device, choice = planned.device, planned.choice
    yield f"{planned.config.model} on {device.name}" + (f"; {device.note}" if device.note else "")
    yield facts(document, "workload choices" if choice else "workload refusal")
    if choice is not None:
        memory = explain_memory(choice.peak)
        peak = f"peak {size(choice.peak.bytes)} +- {100 * choice.peak.error:.0f} %"
        yield Table("memory size_bytes why", memory, f"{peak}, of {size(choice.limit_bytes)} usable")
    if choice is not None and choice.step_s is not None:
        low, high = (duration(3600 * hours) for hours in document["hours_range"])
        speed = f"{step_time(choice.step_s)} a step, {sum(planned.work.lengths) / choice.step_s:,.0f} tokens/s"
        yield f"time: between {low} and {high} ({planned.time_known}), {speed}; without validation and loading"
    elif choice is not None:
        yield "time: unknown for this device; the first steps will show it"
    yield facts({**document, "free_bytes": disk_free_bytes(_folder_of(planned))}, "disk_bytes free_bytes")


def train(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    detach: Annotated[bool, Option("--detach", help="Train in the background.")] = False,
) -> None:
    """Train an adapter. Run the same command again to continue a run that stopped; a finished run stays as it is.

    CONFIG is a YAML file, a file of rows together with --model, or the name or folder of a run that stopped.
    """
    changes = [*(overrides or ()), *arguments.as_overrides(columns, ignore)]
    folder = find_run(config, " or config") if model is None and _names_run(config) else None
    if folder is None:
        run = open_configured(*arguments.read_settings(config, model, changes))
    else:
        if wrong := [change for change in changes if not change.startswith(CHANGEABLE)]:
            names = ", ".join(name.rstrip("=") for name in CHANGEABLE)
            raise UsageError(f"--set {wrong[0]}: an existing run can only change {names}")
        run = load_run(folder)
        run = replace(run, config=override_config(run.config, changes))
    name = shortest_name(run.folder)
    if detach and not run.is_finished:
        start_detached(run.folder, changes if folder is not None else ())
        follow = f"training in the background\nfollow it: hivetune show {name} --follow"
        answer({"run": run.folder, "status": "started"}, Note(follow))
        return
    summary = train_shown(run)
    answer(summary, *training_text(summary), f"next: hivetune eval {name}")


def start_detached(run: Path, overrides: Sequence[str] = ()) -> int:
    """Start `hivetune train RUN --set ...` in its own session, and return its process id.

    Its output goes to RUN/supervisor.log. Raise Busy if the run is already running, UsageError for a folder that
    another user may have made.
    """
    check_owner(run)
    holder = lock_holder(run)
    if holder is not None:
        hint = f"follow it: hivetune show {quoted(run)} --follow"
        raise Busy(f"{run} is already running in process {holder.pid}", hint=hint)
    changed = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "hivetune", "train", str(run), *changed]
    with open(open_plain(run / SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True).pid


def _names_run(word: str) -> bool:
    """Return whether the argument is a run's folder, or can only be its name: no path, no file, no rows."""
    path = Path(word)
    is_path = "/" in word or path.exists() or path.suffix.lower() in (".yaml", ".yml")
    return (path / RECORD).exists() or not (is_path or names_rows(word))


def open_configured(config: RunConfig, name: str) -> Run:
    """Return the run of a config, showing progress while its model and rows are prepared."""
    find_sources(config.data.path)  # report a missing file before preparing a model
    arguments.model_folder(config.model, config.template)
    waited = itertools.count()

    def wait(busy: Busy) -> None:
        if next(waited) == 0:  # once, not at each look
            say(f"{busy.message}: waiting for it to prepare the rows")
        time.sleep(WAIT_S)

    with progress("preparing the rows", "rows") as report:
        return open_run(config, name, report, wait)


def train_shown(run: Run) -> dict[str, Any]:
    """Train under the supervisor, showing progress, and return the document of `train --json`."""
    if run.is_finished:
        return run.summary
    for problem in missing_tools(run.config.report_to):  # said before the hours of training, not after
        say(problem)
    with progress("checking that llama.cpp serves the base") as report:
        warning = unserved_base(run, report)
    if warning:
        say(warning)

    def losses() -> str:
        figures = zip(("loss", "validation", "tokens/s"), newest_losses(run.folder), (3, 3, 0), strict=True)
        return ", ".join(f"{name} {number(value, digits)}" for name, value, digits in figures if value is not None)

    with progress("training", "steps") as report:
        total = len(run.plan.steps)
        summary = train_run(run, Terms(lambda done: report(done, total, losses()), on_wait=say, on_change=say))
    choices = read_resolved(run.folder)[1]
    if choices.kernels_why:
        on_cpu = "without the C++ kernels a step takes about four times as long"
        say(f"slow path: {on_cpu if choices.device == 'cpu' else 'without torch.compile'}. {choices.kernels_why}")
    return summary


TRAINED = "steps loss_first loss_last adapter_step tokens_per_second peak_memory_bytes restarts train_seconds "
TRAINED += "dtype device path kernels rows storage_problem"


def training_text(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that show the result of a run to a person."""
    if summary["already_done"]:
        yield Note(f"{summary['run']} is already finished; nothing was trained")
    yield facts(summary, TRAINED)
    yield from (Note(f"quarantined: {row}") for row in summary["quarantined"])
    if changes := summary["arithmetic_changes"]:
        yield Note("recovery changed the arithmetic, so this adapter differs in rounding from an undisturbed run:")
        yield from (Note(f"  {change}") for change in changes)


def stop(run: RunArgument) -> None:
    """Stop a run after it has saved a checkpoint, and wait until it has ended."""
    folder, limits = find_run(run), supervision()
    # A save in progress may take as long as it may, and hang as long.
    stopped = stop_run(folder, limits.save_timeout_s + limits.hang_floor_s)
    status = run_status(folder)
    said = f"{status.state} at step {status.step} of {status.steps}" if stopped else "is not running"
    following = f"\ncontinue it: hivetune train {shortest_name(folder)}" if stopped else ""
    answer({**to_plain(status), "stopped": stopped}, Note(f"{folder} {said}{following}"))


# What `bench` reports of each run, with mean and standard deviation over the repetitions.
FIGURES = "train_seconds samples_per_second tokens_per_second loss_last validation_loss peak_memory_bytes"
FACTS = "steps trained_tokens device dtype path restarts loss_first"


def bench(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    over: Annotated[
        list[str] | None, Option(metavar="KEY=A,B", help="Train once for each of these values of a setting.")
    ] = None,
    repeat: Annotated[int, Option(min=1, help="Runs of each combination, each with a seed of its own.")] = 1,
) -> None:
    """Measure time, memory, throughput and losses of a config: repeated, and over every combination of settings.

    For example --over batch_size=4,8,16 --set max_steps=50, or --over lora.r=8,32 --repeat 3. The runs are deleted.
    """
    changes = [*(overrides or ()), *arguments.as_overrides(columns, ignore)]
    loaded, name = arguments.read_settings(config, model, changes)
    grid = combinations(over or ())
    planned = [override_config(loaded, settings, "--over") for settings in grid]  # a wrong value is refused first
    lines: list[dict[str, Any]] = []
    with scratch_folder(home() / "bench") as folder:
        for place, (settings, changed) in enumerate(zip(grid, planned, strict=True)):
            runs = []
            for repetition in range(repeat):
                say(f"{' '.join(settings) or name}, {repetition + 1} of {repeat}")
                # A folder and a seed of its own: no run continues another.
                update = {"output": str(folder / f"{place}-{repetition}"), "seed": changed.seed + repetition}
                runs.append(_measured(changed.model_copy(update=update), name))
            lines.append({"settings": settings, "runs": runs, "figures": summary(runs)})
    table = [{"settings": " ".join(line["settings"]) or "as given", **line["figures"]} for line in lines]
    answer({"config": config, "repeat": repeat, "combinations": lines}, Table(f"settings {FIGURES}", table))


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
    """Train one run and return its figures, or the reason why it has none: a combination may not fit."""
    try:
        found = train_shown(open_configured(config, name))
    except (DoesNotFit, RecoveryExhausted) as error:  # the other combinations are still of use
        say(f"no figures: {error.message}")
        return {"seed": config.seed, "error": error.message}
    found["validation_loss"] = (found["best"] or {}).get("loss")
    return {"seed": config.seed, **{key: found[key] for key in f"{FACTS} {FIGURES}".split()}}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return mean and standard deviation of each figure; None without a value, or for the deviation of a single one."""
    figures = {}
    for key in FIGURES.split():
        values = [run[key] for run in runs if run.get(key) is not None]
        mean = statistics.fmean(values) if values else None
        figures[key] = {"mean": mean, "sd": statistics.stdev(values) if len(values) > 1 else None}
    return figures
