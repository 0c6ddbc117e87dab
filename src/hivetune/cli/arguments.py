"""The arguments and options of the commands, each declared once, and how settings are read from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hivetune.base.paths import quoted
from hivetune.cli.output import progress, say
from hivetune.config import RunConfig, load_config, parse_config
from hivetune.data.columns import FIELDS
from hivetune.data.files.find import check_storable, names_rows
from hivetune.data.mapping import parse_columns, parse_names
from hivetune.errors import UsageError
from hivetune.models.prepared import TemplateArguments, fetch_model, find_prepared

_COLUMNS_HELP = (
    "Map your columns: prompt=question,completion=reply. Join several with +: prompt=title+body. "
    f"Fields: {', '.join(FIELDS)}."
)
_MODEL_HELP = "Train this model; CONFIG is then a file of rows."
_RELEASE_HELP = "A release: NAME, NAME@3 or NAME@candidate."

RunArgument = Annotated[str, Argument(metavar="RUN", help="Name or folder of a run, or 'last'.")]
ConfigArgument = Annotated[
    str, Argument(metavar="CONFIG", help="YAML config, or a file of rows together with --model.")
]
ModelOption = Annotated[str | None, Option("--model", "-m", metavar="M", help=_MODEL_HELP)]
SetOption = Annotated[list[str] | None, Option("--set", metavar="A.B=C", help="Override a setting of the config.")]
ColumnsOption = Annotated[str | None, Option("--columns", metavar="FIELD=COLUMN,...", help=_COLUMNS_HELP)]
IgnoreOption = Annotated[str | None, Option("--ignore", metavar="A,B,...", help="Columns to leave unread.")]
ReleaseArgument = Annotated[str, Argument(metavar="NAME@VERSION", help=_RELEASE_HELP)]
ReasonOption = Annotated[str, Option("--reason", help="Reason, which is recorded in the history.")]
CaptureOption = Annotated[bool, Option("--capture", help="Save prompts and answers in the store.")]
ThreadsOption = Annotated[int | None, Option(min=1, help="Number of CPU threads.")]


def as_overrides(columns: str | None, ignore: str | None) -> list[str]:
    """Return --columns and --ignore as overrides of `data.columns` and `data.ignore`. Raises UsageError."""
    overrides = [] if columns is None else [f"data.columns={json.dumps(parse_columns(columns))}"]
    if ignore is not None:
        overrides.append(f"data.ignore={json.dumps(parse_names(ignore))}")
    return overrides


def read_settings(config: str, model: str | None, overrides: Sequence[str] = ()) -> tuple[RunConfig, str]:
    """Return the settings and a name for their runs, from a YAML file, or from rows and a model.

    Raises UsageError.
    """
    path, is_yaml = Path(config), config.lower().endswith((".yaml", ".yml"))
    if path.is_dir() and is_yaml:  # the reader of YAML would say only that it cannot read it
        raise UsageError(f"{config} is a folder", hint="give a YAML file, or a file of rows with --model")
    if model is None and not names_rows(config):
        return load_config(path, overrides), path.stem
    if is_yaml:
        hint = f"to change its model: --set model={model}"
        raise UsageError(f"--model is used with a file of rows, but {config} is a config", hint=hint)
    if model is None:  # given as --set model=...
        model = next((text.removeprefix("model=") for text in overrides if text.startswith("model=")), None)
    if model is None:
        hint = f"add --model smollm2-135m, or write a config: hivetune init {quoted(config)}"
        raise UsageError(f"{config} is a file of rows, but no model is given", hint=hint)
    check_storable(config)  # its name goes into the settings, which are UTF-8
    settings = parse_config({"model": model, "data": {"path": config}}, "command line", overrides)
    say(
        f"settings: {settings.epochs:g} epochs, batch_size {settings.batch_size}, "
        f"learning_rate {settings.learning_rate:g}, lora.r {settings.lora.r}, max_length {settings.max_length}; "
        "change them with --set; list all: hivetune config"
    )
    return settings, "rows" if config == "-" else path.stem


def model_folder(model: str, template: TemplateArguments | None = None) -> Path:
    """Return the folder of a prepared model, which is prepared first, with a progress bar, if it is missing."""
    if find_prepared(model, template) is None:
        say(f"preparing {model} and this machine's kernels, once per machine")  # a minute, of which nothing is counted
    with progress(f"preparing {model}") as report:
        return fetch_model(model, report, template)
