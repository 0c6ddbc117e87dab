"""`hivetune fetch`: get and prepare a model, the only command that needs a network; and how others wait for one."""

from pathlib import Path
from typing import Annotated

import typer

from hivetune.cli.output import emit, progress, say, size
from hivetune.models.prepared import read_prepared
from hivetune.walk.fetch import fetch_model


def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, or smollm2-135m.")],
) -> None:
    """Get a model and prepare it once: safetensors, tokenizer, chat template. A Hub id needs a network."""
    folder = model_folder(model)
    prepared = read_prepared(folder)
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(f"{model}: ready in {folder} ({size(size_bytes)})")
    emit({"model": model, "folder": str(folder), "kind": prepared.kind, "size_bytes": size_bytes})


def model_folder(model: str) -> Path:
    """The folder of a prepared model. The first time that takes half a minute or longer, which is seen."""
    with progress(f"preparing {model}, once on this machine") as report:
        return fetch_model(model, report)
