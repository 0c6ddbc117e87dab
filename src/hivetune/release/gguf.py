"""GGUF files as seen from outside the engine: written by a task of the engine, then read back.

A file that was written is not yet a file that can be used: its header is read back and compared with what was meant.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.errors import HivetuneError
from hivetune.models.gguf_header import read_header
from hivetune.process.parent import run_task
from hivetune.records import Progress
from hivetune.release.quantize import Recipe


def write_model(model: Path, adapter: Path | None, recipe: Recipe, folder: Path, file: str, progress: Progress) -> Path:
    """`folder/file`: the model with the adapter merged into it. Raises what the task says (UsageError, ...)."""
    task = {
        "kind": "model",
        "model": str(model),
        "adapter": None if adapter is None else str(adapter),
        "recipe": recipe.as_task(),
        "file": file,
        "name": Path(file).stem,
    }
    return _write(task, folder, "writing the GGUF file", progress)


def write_adapter(model: Path, adapter: Path, base_name: str, folder: Path, file: str, progress: Progress) -> Path:
    """`folder/file`: the adapter alone, for llama.cpp's `--lora`. Raises what the task says."""
    task = {
        "kind": "adapter",
        "model": str(model),
        "adapter": str(adapter),
        "base_name": base_name,
        "file": file,
        "name": Path(file).stem,
    }
    return _write(task, folder, "writing the GGUF adapter", progress)


def check_model(model: Path, folder: Path) -> None:
    """Raises now what a GGUF export of this model would raise later: architecture, tensors, tokenizer. One second."""
    task = {"kind": "check", "model": str(model), "adapter": None}
    run_task("to_gguf", task, folder).check("the export check")


def _write(task: Mapping[str, Any], folder: Path, what: str, progress: Progress) -> Path:
    done = 0

    def beat(kind: str) -> None:
        nonlocal done
        if kind == "t":
            done += 1
            progress(done, None)

    result = run_task("to_gguf", task, folder, on_beat=beat).check(what)
    path = folder / str(task["file"])
    header = read_header(path)
    if len(header.tensors) != result["tensors"] or header.is_adapter != (task["kind"] == "adapter"):
        raise HivetuneError(f"{path} does not read back as it was written: {len(header.tensors)} tensors")
    progress(done, done)
    return path
