"""The command `sweep`: one config with several settings, trained side by side; the best is judged."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.cli.arguments import (
    ColumnsOption,
    ConfigArgument,
    ModelOption,
    SetOption,
    complete_setting,
    read_settings,
)
from hivetune.cli.output import emit, number, progress, say, show, table
from hivetune.errors import NotDeployed, UsageError
from hivetune.sweep import CURVES, run_sweep

KEEP = ("all", "best")


def sweep(
    config: ConfigArgument,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=A,B", help="More settings to try, as in --over.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", metavar="KEY=A,B", help="Train once per value of this setting.", autocompletion=complete_setting
        ),
    ] = None,
    keep: Annotated[
        str, typer.Option("--keep", metavar="all|best", help="Keep all runs, or delete all but the best.")
    ] = "all",
    on: Annotated[
        str | None, typer.Option("--on", metavar="HOST:PORT", help="Use all devices of this cluster.")
    ] = None,
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
    show(f"next: hivetune export {best['run']} --to gguf" if verdict["verdict"] == "deploy" else f"run: {best['run']}")


def _above(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return ""
    interval = estimate["ci95"]
    return number(estimate["value"]) + (f" ({number(interval[0])} to {number(interval[1])})" if interval else "")
