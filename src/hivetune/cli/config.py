"""`hivetune config`: the settings as JSON Schema for editors, and their defaults."""

import json
from typing import Annotated

import typer

from hivetune.cli.output import MODE, emit
from hivetune.config import RunConfig, known_keys


def config(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the YAML file.")] = False,
) -> None:
    """The settings of the YAML file: names and defaults, or with --schema their JSON Schema."""
    document = RunConfig.model_json_schema()
    if MODE.json:
        emit({"json_schema": document, "keys": known_keys()})
    elif schema:
        typer.echo(json.dumps(document, indent=1))
    else:
        for key in known_keys():
            typer.echo(key)
