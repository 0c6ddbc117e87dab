"""GGUF files as seen from outside the engine: written by a task of the engine, then read back.

A file that was written is not yet a file that can be used: its header is read back and compared with what was meant.
"""

from pathlib import Path

from hivetune.errors import HivetuneError
from hivetune.models.gguf_header import read_header
from hivetune.process.parent import count_items, run_task
from hivetune.process.protocol import WriteGguf, WriteGgufAdapter
from hivetune.records import Progress
from hivetune.release.quantize import Recipe


def write_gguf_model(
    model: Path, adapter: Path | None, recipe: Recipe, folder: Path, file: str, progress: Progress
) -> Path:
    """`folder/file`: the model with the adapter merged into it. Raises what the task says (UsageError, ...)."""
    task = WriteGguf(model, adapter, folder / file, recipe.as_task())
    return _write(task, folder, "writing the GGUF file", progress)


def write_gguf_adapter(model: Path, adapter: Path, base_name: str, folder: Path, file: str, progress: Progress) -> Path:
    """`folder/file`: the adapter alone, for llama.cpp's `--lora`. Raises what the task says."""
    task = WriteGgufAdapter(model, adapter, folder / file, base_name)
    return _write(task, folder, "writing the GGUF adapter", progress)


def _write(task: WriteGguf | WriteGgufAdapter, folder: Path, what: str, progress: Progress) -> Path:
    result = run_task(task, folder, on_beat=count_items(progress, None)).check(what)
    path = task.file
    header = read_header(path)
    if len(header.tensors) != result["tensors"] or header.is_adapter != isinstance(task, WriteGgufAdapter):
        raise HivetuneError(f"{path} reads back with {len(header.tensors)} tensors, {result['tensors']} were written")
    progress(result["tensors"], result["tensors"])
    return path
