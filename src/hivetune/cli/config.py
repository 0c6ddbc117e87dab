"""`hivetune config`: the settings with their defaults, for people, and as JSON Schema for editors."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from hivetune.cli.output import MODE, emit, table
from hivetune.config import config_schema, known_settings


def config(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the YAML file.")] = False,
) -> None:
    """The settings of the YAML file: names, defaults and what they do, or with --schema their JSON Schema."""
    document = config_schema()
    settings = known_settings()
    if schema and not MODE.json:
        typer.echo(json.dumps(document, indent=1))
        return
    rows = [(each.key, each.default.strip('"') or "required", each.meaning) for each in settings]
    table("", ("setting", "default", "what it is"), rows)
    keys = [each.key for each in settings]
    emit({"json_schema": document, "keys": keys, "settings": [asdict(each) for each in settings]})
