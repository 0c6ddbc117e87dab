"""Arguments that several commands take (runs, configs, models, settings, columns), their completion, and `fetch`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.database import home_as_it_is
from hivetune.base.disk import size_of
from hivetune.base.paths import quoted, spelled
from hivetune.cli.output import MODE, emit, progress, say, show, size
from hivetune.config import (
    RunConfig,
    known_settings,
    load_config,
    override_config,
    parse_config,
)
from hivetune.data.columns import FIELDS
from hivetune.data.files.find import check_storable, names_rows
from hivetune.data.mapping import check_columns, parse_columns, write_columns
from hivetune.errors import MachineNotFit, UsageError
from hivetune.models.fetch import fetch_model
from hivetune.models.prepared import PACKAGED, prepared_names, read_prepared
from hivetune.release.gguf import FETCH_NAME, fetch_converter
from hivetune.release.registry import releases
from hivetune.run.status import LAST, run_folders

# Completions; typer keeps those that begin with what was typed.


def complete_run() -> list[str]:
    """Return the names of runs."""
    return [LAST, *(run.name for run in run_folders())]


def complete_setting(incomplete: str) -> list[str]:
    """Return `a.b=` for each setting, and after the equals sign the values of a setting that has few."""
    completions = []
    for setting in known_settings():
        if incomplete.startswith(f"{setting.key}="):
            completions += [f"{setting.key}={value}" for value in setting.choices]
        else:
            completions.append(f"{setting.key}=")
    return completions


def complete_model() -> list[str]:
    """Return the models on this machine."""
    return list(dict.fromkeys((*PACKAGED, *prepared_names())))


def complete_release() -> list[str]:
    """Return NAME and NAME@VERSION of each release."""
    with home_as_it_is() as database:
        all_releases = releases(database)
    return [*dict.fromkeys(release.name for release in all_releases), *(release.label for release in all_releases)]


RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Name or folder of a run, or 'last'.", autocompletion=complete_run),
]
ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="YAML config, or a file of rows together with --model.")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="M",
        help="Train this model; CONFIG is then a file of rows.",
        autocompletion=complete_model,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting of the config.", autocompletion=complete_setting),
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="FIELD=COLUMN,...",
        help="Map your columns: prompt=question,completion=reply. Join several with +: prompt=title+body. "
        f"Fields: {', '.join(FIELDS)}.",
    ),
]
IgnoreOption = Annotated[
    str | None, typer.Option("--ignore", metavar="A,B,...", help="Columns that are not read on purpose.")
]
ReleaseArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME@VERSION", help="A release: NAME, NAME@3 or NAME@candidate.", autocompletion=complete_release
    ),
]


def with_columns(settings: RunConfig, columns: str | None, ignore: str | None = None) -> RunConfig:
    """Return the settings with `--columns` in place of `data.columns`, and `--ignore` of `data.ignore`. Raises
    UsageError.
    """
    update: dict[str, object] = {} if columns is None else {"columns": parse_columns(columns)}
    if ignore is not None:
        update["ignore"] = parse_names(ignore)
    return settings.model_copy(update={"data": settings.data.model_copy(update=update)})


def parse_names(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def read_settings(
    config: str,
    model: str | None,
    overrides: Sequence[str] | None,
    columns: str | None = None,
    ignore: str | None = None,
) -> tuple[RunConfig, str]:
    """Return the settings and the name for their runs, from a YAML file, or from rows and a model.

    Raises UsageError.
    """
    path = Path(config)
    if path.is_dir() and path.suffix.lower() in (".yaml", ".yml"):
        raise UsageError(f"{config} is a folder", hint="give a YAML file, or a file of rows with --model")
    if model is None and not names_rows(config):
        return with_columns(load_config(path, overrides or ()), columns, ignore), path.stem
    if path.suffix.lower() in (".yaml", ".yml"):
        raise UsageError(
            f"--model {model} is for rows, but {config} is a config", hint=f"to change its model: --set model={model}"
        )
    if model is None:  # given as --set model=...
        model = next((text.removeprefix("model=") for text in overrides or () if text.startswith("model=")), None)
    if model is None:
        raise UsageError(
            f"{config} holds rows, and no model is given",
            hint=f"add --model smollm2-135m, or write a config: hivetune init {quoted(config)}",
        )
    check_storable(config)
    settings = override_config(
        parse_config({"model": model, "data": {"path": config}}, "command line"), overrides or ()
    )
    say(
        f"settings: {settings.epochs:g} epochs, batch_size {settings.batch_size}, "
        f"learning_rate {settings.learning_rate:g}, lora.r {settings.lora.r}, max_length {settings.max_length}; "
        "change them with --set; list all: hivetune config"
    )
    return with_columns(settings, columns, ignore), "rows" if config == "-" else path.stem


# Rows whose layout is unknown: mappings of their columns are suggested, shown with examples and confirmed once.

QUESTION = "Use this mapping? [Y/n/2/3/edit]"


def show_suggestion(line: Mapping[str, Any]) -> None:
    """Show a mapping, some rows as it reads them, and the columns that it leaves out."""
    left_out = f"   left out: {', '.join(line['left_out'])}" if line["left_out"] else ""
    show(f"  {line['line']}{left_out}")
    for row in line["shown"]:
        show(f"    asked: {row['question']}\n    answered: {row['answer']}")


def confirm_columns(settings: RunConfig) -> tuple[dict[str, str] | None, bool]:
    """Return the mapping for the rows, and whether a person confirmed it.

    The mapping is None if none is needed, none is known, other files are read without one or the person declined.
    Without a terminal nobody is asked.
    """
    if settings.data.columns:
        return None, False
    with progress("reading the files", "files") as report:
        # The rules of redaction take half a second to compile, which no other command should wait for.
        from hivetune.data.prepare.understand import suggested_for

        suggested, others = suggested_for(settings.data.path, settings.data.encoding, report)
    name, lines = next(iter(suggested.items()), ("", []))
    if not lines:
        return None, False
    show(f"{spelled(name)}: unknown layout; possible mappings:")
    for number, line in enumerate(lines, 1):
        show(f" {number}.")
        show_suggestion(line)
    if others:
        say(
            f"a mapping holds for all files, and {spelled(others[0])} needs none: give the others a config of their own"
        )
        return None, False
    if MODE.json or not sys.stdin.isatty():
        say("no terminal to confirm it on: the first mapping is written as a comment")
        return dict(lines[0]["columns"]), False
    return _answer(lines)


def _answer(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str] | None, bool]:
    choices = {str(number): dict(line["columns"]) for number, line in enumerate(lines, 1)}
    choices["y"] = choices["yes"] = choices["1"]
    while (reply := typer.prompt(QUESTION, default="Y", show_default=False, err=True).strip().lower()) not in choices:
        if reply in ("n", "no"):
            return None, False
        if reply in ("e", "edit"):
            columns = parse_columns(typer.prompt("--columns", default=write_columns(choices["1"]), err=True))
            check_columns(columns)
            return columns, True
        say(f"there is no mapping {reply!r}")
    return choices[reply], True


def fetch(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Hub id, folder, GGUF file, smollm2-135m, or llama.cpp for its converter."
        ),
    ],
) -> None:
    """Download a model and prepare its weights, tokenizer and chat template, once per machine.

    A Hub id needs a network. The first fetch also downloads llama.cpp's converter, which writes GGUF files.
    """
    if model == FETCH_NAME:
        converter = fetch_converter()
        say(f"llama.cpp's converter: ready in {converter}")
        emit({"model": model, "folder": str(converter), "kind": "converter", "size_bytes": size_of(converter)})
        return
    folder = model_folder(model)
    prepared = read_prepared(folder)
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(f"{model}: ready in {folder} ({size(size_bytes)})")
    try:
        fetch_converter()
    except MachineNotFit as error:  # the model trains without it
        say(f"cannot write GGUF files yet: {error.message}; {error.hint}")
    emit({"model": model, "folder": str(folder), "kind": prepared.kind, "size_bytes": size_bytes})


def model_folder(model: str) -> Path:
    """Return the folder of a prepared model, with a progress bar if it has to be prepared first."""
    with progress(f"preparing {model}, once per machine") as report:
        return fetch_model(model, report)
