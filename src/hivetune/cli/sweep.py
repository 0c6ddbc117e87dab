"""The command `sweep`: one config with several settings, trained side by side; the best is judged."""

from pathlib import Path
from typing import Any

import typer

from hivetune.cli.arguments import (
    read_settings,
)
from hivetune.cli.output import emit, number, progress, say, show, table
from hivetune.errors import NotDeployed, UsageError
from hivetune.sweep import CURVES, run_sweep

KEEP = ("all", "best")


def sweep(
    config: str,
    more: list[str] | None = None,
    over: list[str] | None = None,
    keep: str = "all",
    on: str | None = None,
    model: str | None = None,
    columns: str | None = None,
    overrides: list[str] | None = None,
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
