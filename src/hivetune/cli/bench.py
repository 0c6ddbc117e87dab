"""The command `bench`: what runs of a config take and reach on this machine, repeated and over a grid of settings."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.disk import home, scratch_folder, write_json
from hivetune.base.paths import spelled
from hivetune.cli.arguments import (
    ColumnsOption,
    ConfigArgument,
    IgnoreOption,
    ModelOption,
    SetOption,
    complete_setting,
    read_settings,
)
from hivetune.cli.output import duration, emit, number, say, show, size, table
from hivetune.cli.training import open_configured, train_shown
from hivetune.config import RunConfig, override_config
from hivetune.errors import DoesNotFit, RecoveryExhausted, UsageError

FIGURES = (
    "train_seconds",
    "samples_per_second",
    "tokens_per_second",
    "loss_first",
    "loss_last",
    "validation_loss",
    "peak_memory_bytes",
)
FACTS = ("steps", "trained_tokens", "device", "dtype", "path", "restarts")


def bench(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Run once per value of this setting.", autocompletion=complete_setting),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each combination, each with a seed of its own.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file too.")] = None,
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
                output = str(folder / f"{place}-{repetition}")
                seeded = changed.model_copy(update={"output": output, "seed": changed.seed + repetition})
                runs.append(_measured(seeded, name))
            lines.append({"settings": settings, "runs": runs, "figures": summary(runs)})
    document = {"config": config, "repeat": repeat, "combinations": lines}
    if out is not None:
        write_json(out, document)
    _show(lines)
    if out is not None:
        show(f"written: {spelled(out)}")
    emit(document)


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
        figures[key] = {
            "mean": statistics.fmean(values) if values else None,
            "sd": statistics.stdev(values) if len(values) > 1 else None,
        }
    return figures


def _show(lines: Sequence[Mapping[str, Any]]) -> None:
    columns = ("settings", "time", "samples/s", "tokens/s", "last loss", "validation loss", "peak memory")
    rows = []
    for line in lines:
        figures = line["figures"]
        failed = sum("error" in run for run in line["runs"])
        cells = [_cell(figures[key], digits) for key, digits in (("samples_per_second", 2), ("tokens_per_second", 0))]
        cells += [_cell(figures[key], 3) for key in ("loss_last", "validation_loss")]
        seconds, memory = figures["train_seconds"]["mean"], figures["peak_memory_bytes"]["mean"]
        named = " ".join(line["settings"]) or "as given"
        rows.append(
            (
                f"{named} ({failed} failed)" if failed else named,
                "-" if seconds is None else duration(seconds),
                *cells,
                "-" if memory is None else size(memory),
            )
        )
    table("", columns, rows)


def _cell(figure: Mapping[str, float | None], digits: int) -> str:
    spread = "" if figure["sd"] is None else f" ± {number(figure['sd'], digits)}"
    return f"{number(figure['mean'], digits)}{spread}"
