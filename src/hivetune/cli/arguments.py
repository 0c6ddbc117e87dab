"""What several commands take: a run, a config or rows with a model, settings; and how a shell completes them."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from hivetune.base.database import database_path, open_database
from hivetune.base.paths import quoted
from hivetune.cli.output import say
from hivetune.config import RunConfig, known_settings, load_config, override_config, parse_config
from hivetune.data.intake.files import names_rows
from hivetune.data.intake.places import check_storable
from hivetune.data.mapping import parse_columns
from hivetune.errors import UsageError
from hivetune.models.prepared import PACKAGED, prepared_names
from hivetune.release.registry import releases
from hivetune.run.find import LAST, known_runs


def complete_run(incomplete: str) -> list[str]:
    """Names of runs, for a shell."""
    return [name for name in (LAST, *(status.run.name for status in known_runs())) if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """`a.b=` for a shell, and behind it the values of a setting that has few."""
    found = []
    for setting in known_settings():
        values = [f"{setting.key}={value}" for value in setting.choices]
        found += values if incomplete.startswith(f"{setting.key}=") else [f"{setting.key}="]
    return [word for word in found if word.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Models that are on this machine, for a shell."""
    return [name for name in dict.fromkeys((*PACKAGED, *prepared_names())) if name.startswith(incomplete)]


def complete_release(incomplete: str) -> list[str]:
    """NAME and NAME@VERSION, for a shell."""
    if not database_path().exists():
        return []
    with closing(open_database()) as database:
        known = releases(database)
    names = dict.fromkeys(release.name for release in known)
    return [word for word in (*names, *(release.label for release in known)) if word.startswith(incomplete)]


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run: its name, folder or 'last'; see: hivetune runs", autocompletion=complete_run
    ),
]
ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="YAML file (docs/config.md), or rows together with --model.")
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="M", help="CONFIG is rows for this model.", autocompletion=complete_model),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting.", autocompletion=complete_setting),
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="OURS=YOURS,...",
        help="Your columns: prompt=question,completion=reply, or several: completion=category+priority",
    ),
]
ReleaseArgument = Annotated[
    str,
    typer.Argument(metavar="NAME@VERSION", help="NAME, NAME@3, NAME@candidate, ...", autocompletion=complete_release),
]


def with_columns(settings: RunConfig, columns: str | None) -> RunConfig:
    """The settings with what `--columns` says in place of `data.columns`. Raises UsageError."""
    if columns is None:
        return settings
    data = settings.data.model_copy(update={"columns": parse_columns(columns)})
    return settings.model_copy(update={"data": data})


def read_settings(
    config: str, model: str | None, overrides: Sequence[str] | None, columns: str | None = None
) -> tuple[RunConfig, str]:
    """The settings and the name of their runs: of a YAML file, or of rows with a model and all else at its default.

    Raises UsageError.
    """
    path = Path(config)
    if path.is_dir() and path.suffix.lower() in (".yaml", ".yml"):
        raise UsageError(f"{config} is a folder", hint="give a YAML file, or rows together with --model")
    if model is None and not names_rows(config):
        return with_columns(load_config(path, overrides or ()), columns), path.stem
    if path.suffix.lower() in (".yaml", ".yml"):
        raise UsageError(
            f"--model {model}: {config} names its model itself", hint=f"in place of --model: --set model={model}"
        )
    if model is None:  # said as a setting, which is then set as all others are
        model = next((text.removeprefix("model=") for text in overrides or () if text.startswith("model=")), None)
    if model is None:
        raise UsageError(
            f"{config} is rows: which model should learn them?",
            hint=f"add --model smollm2-135m, or write a config first: hivetune init {quoted(config)}",
        )
    check_storable(config)
    settings = override_config(
        parse_config({"model": model, "data": {"path": config}}, "command line"), overrides or ()
    )
    say(
        f"settings: {settings.epochs:g} epochs, batch_size {settings.batch_size}, "
        f"learning_rate {settings.learning_rate:g}, lora.r {settings.lora.r}, max_length {settings.max_length}; "
        "others: --set, and hivetune config"
    )
    return with_columns(settings, columns), "rows" if config == "-" else path.stem
