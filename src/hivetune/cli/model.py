"""`hivetune fetch`: get and prepare a model, the only command that needs a network; and how others wait for one."""

from pathlib import Path
from typing import Annotated

import typer

from hivetune.base.disk import size_of
from hivetune.cli.output import emit, progress, say, size
from hivetune.errors import MachineNotFit
from hivetune.models.fetch import fetch_model
from hivetune.models.prepared import read_prepared
from hivetune.release.converter import FETCH_NAME, fetch_converter


def fetch(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, smollm2-135m; or llama.cpp: its converter."),
    ],
) -> None:
    """Get a model and prepare it once: safetensors, tokenizer, chat template. A Hub id needs a network, and so does
    llama.cpp's converter, which comes with the first model."""
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
        say(f"GGUF files can't be written yet: {error.message}; {error.hint}")
    emit({"model": model, "folder": str(folder), "kind": prepared.kind, "size_bytes": size_bytes})


def model_folder(model: str) -> Path:
    """The folder of a prepared model. The first time that takes half a minute or longer, which is seen."""
    with progress(f"preparing {model}, once on this machine") as report:
        return fetch_model(model, report)
