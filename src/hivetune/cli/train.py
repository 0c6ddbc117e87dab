"""The command `train`: open the run of a config, or a run, train it under the supervisor, show the result."""

from pathlib import Path
from typing import Annotated

import typer

from hivetune.cli.arguments import ColumnsOption, ConfigArgument, IgnoreOption, ModelOption, SetOption, read_settings
from hivetune.cli.output import emit, show, show_unit
from hivetune.data.files.find import names_rows
from hivetune.errors import UsageError
from hivetune.process.detach import systemd_unit
from hivetune.run.folder import RECORD
from hivetune.run.status import find_run, shortest_name

# What an existing run may change: where and how carefully it works.
CHANGEABLE = ("report_to=", "memory_share=", "allow=")


def train(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Train in the background.")] = False,
    unit: Annotated[
        bool, typer.Option("--unit", help="Print a systemd user unit that continues this run, and do nothing else.")
    ] = False,
) -> None:
    """Train an adapter. Run the same command again to continue a run that stopped; a finished run stays as it is.

    CONFIG is a YAML file, a file of rows together with --model, or the name or folder of a run that stopped.
    """
    run_folder = find_run(config, " or config") if model is None and _names_run(config) else None
    if run_folder is None:
        loaded, name = read_settings(config, model, overrides or [], columns, ignore)
    elif wrong := [override for override in overrides or () if not override.startswith(CHANGEABLE)]:
        names = ", ".join(name.rstrip("=") for name in CHANGEABLE)
        raise UsageError(f"--set {wrong[0]}: an existing run can only change {names}")
    if unit:
        if run_folder is None:
            raise UsageError("--unit is for a run that was started", hint="hivetune train RUN --unit")
        show_unit(systemd_unit(run_folder, overrides or ()), f"hivetune-{run_folder.name}", run=run_folder)
        return
    from hivetune.cli.training import continued, open_configured, show_training, train_detached, train_shown

    run = open_configured(loaded, name) if run_folder is None else continued(run_folder, overrides or ())
    if detach and not run.is_finished:
        train_detached(run.folder, overrides if run_folder is not None and overrides else ())
        return
    summary = train_shown(run)
    show_training(summary)
    show(f"next: hivetune eval {shortest_name(run.folder)}")
    emit(summary)


def _names_run(word: str) -> bool:
    """Return whether the argument is a run's folder, or can only be its name: no path, no file, no rows."""
    path = Path(word)
    is_path = "/" in word or path.exists() or path.suffix.lower() in (".yaml", ".yml")
    return (path / RECORD).exists() or not (is_path or names_rows(word))
