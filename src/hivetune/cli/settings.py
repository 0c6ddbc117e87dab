"""The settings of a command that takes a config, or rows and a model on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hivetune.cli.output import say
from hivetune.config import RunConfig, load_config, override_config, parse_config
from hivetune.data.intake.files import names_rows
from hivetune.errors import UsageError

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="YAML file (docs/config.md), or rows together with --model.")
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="M", help="CONFIG is rows for this model.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting.")]


def read_settings(config: str, model: str | None, overrides: Sequence[str] | None) -> tuple[RunConfig, str]:
    """The settings and the name of their runs: of a YAML file, or of rows with a model and all else at its default.

    Raises UsageError.
    """
    path = Path(config)
    if model is None and not names_rows(config):
        return load_config(path, overrides or ()), path.stem
    if path.suffix.lower() in (".yaml", ".yml"):
        raise UsageError(
            f"--model {model}: {config} names its model itself", hint=f"hivetune train {config} --set model={model}"
        )
    if model is None:
        raise UsageError(
            f"{config} is rows: which model should learn them?",
            hint=f"hivetune train {config} --model smollm2-135m, or write a config first: hivetune init {config}",
        )
    settings = override_config(
        parse_config({"model": model, "data": {"path": config}}, "command line"), overrides or ()
    )
    say(
        f"settings: {settings.epochs:g} epochs, batch_size {settings.batch_size}, "
        f"learning_rate {settings.learning_rate:g}, lora.r {settings.lora.r}, max_length {settings.max_length}; "
        "others: --set, and hivetune config"
    )
    return settings, "rows" if config == "-" else path.stem
