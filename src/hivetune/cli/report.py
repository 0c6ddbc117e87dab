"""The command `report`: the figures of a run, sent to tools that people already use."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args

import typer

from hivetune.base.disk import file_to_write, write_atomic
from hivetune.base.paths import install_command, real_path
from hivetune.cli.arguments import complete_run
from hivetune.cli.output import emit, emit_until_stopped, say, show
from hivetune.config import ReportTarget
from hivetune.dashboard.exporters.follow import destination_of, report_on, report_once, view_command
from hivetune.errors import Busy, MachineNotFit, UsageError
from hivetune.run.status import find_run, known_runs

ALL = "all"
TARGETS: tuple[str, ...] = get_args(ReportTarget)
OF_HOME = ("prometheus", "grafana")
NICENESS = 10  # training has priority
WRITE_AGAIN_S = 15.0


def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN|all", help="Name or folder of a run, or 'all'.", autocompletion=complete_run)
    ],
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="PLACE", help="Folder to write to; for mlflow also a URI, for prometheus and grafana a file."
        ),
    ] = None,
    to: Annotated[
        str, typer.Option(help="tensorboard, mlflow, trackio, wandb; with 'all' also prometheus, grafana.")
    ] = "tensorboard",
    follow: Annotated[bool, typer.Option("--follow", help="Keep sending until the run ends.")] = False,
) -> None:
    """Send the figures of a run to TensorBoard, MLflow, trackio or W&B. Nothing is sent twice.

    To send them during training, set `report_to` in the config. `all --to prometheus FILE` writes metrics for
    node_exporter; `all --to grafana FILE` writes a dashboard to import.
    """
    if follow:
        os.nice(NICENESS)
    if to in OF_HOME:
        _report_home(run, to, place, follow=follow)
        return
    destination = destination_of(_target(to), place)
    reports = []
    for folder in _runs(run):
        try:
            reports.append(report_on(folder, destination, say) if follow else report_once(folder, destination))
        except (UsageError, Busy) as error:
            if run != ALL:
                raise
            say(f"{folder.name}: skipped: {error.message}")
    for state in reports:
        show(f"{Path(state.run).name}: {state.points} points in {destination.target}, {state.sent} of them sent now")
    show(f"view them: {view_command(destination)}")
    emit({"reports": reports})


def _report_home(run: str, to: str, place: str | None, *, follow: bool) -> None:
    if run != ALL or place is None:
        raise UsageError(f"--to {to} covers all runs, not one", hint=f"use: hivetune report all FILE --to {to}")
    try:
        from hivetune.dashboard.exporters.prometheus import dashboard, write_textfile
    except ModuleNotFoundError as error:
        raise MachineNotFit(f"{error.name} is not installed", hint=install_command("serve")) from None
    path = file_to_write(real_path(place))
    if to == "grafana":
        write_atomic(path, dashboard().encode())
        show(f"{path}: import it in Grafana (Dashboards, New, Import) and choose your Prometheus")
        emit({"to": to, "path": path})
        return
    write_textfile(path)
    show(f"{path}: {f'updated every {WRITE_AGAIN_S:.0f} s until Ctrl-C' if follow else 'written'}")
    (emit_until_stopped if follow else emit)({"to": to, "path": path})
    while follow:
        time.sleep(WRITE_AGAIN_S)
        write_textfile(path)


def _target(name: str) -> ReportTarget:
    for target in TARGETS:
        if target == name:
            return target  # type: ignore[return-value]
    raise UsageError(f"--to {name}: unknown tool", hint=f"choose one of: {', '.join((*TARGETS, *OF_HOME))}")


def _runs(name: str) -> Iterator[Path]:
    if name != ALL:
        yield find_run(name)
        return
    for status in sorted(known_runs(), key=lambda status: status.created):
        if status.problem:
            say(f"{status.run.name}: skipped: {status.problem}")
        else:
            yield status.run
