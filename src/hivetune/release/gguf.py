"""GGUF files as seen from outside the engine: written by llama.cpp's converter in a child, then read back.

A file that was written is not yet a file that can be used: its header is read back and compared with what was meant.
"""

from pathlib import Path

from hivetune.errors import HivetuneError
from hivetune.models.gguf_header import read_header
from hivetune.models.prepared import spoken_name
from hivetune.process.parent import count_items, run_task
from hivetune.process.protocol import WriteGguf, WriteGgufAdapter
from hivetune.records import Progress
from hivetune.release.converter import find_converter
from hivetune.release.quantize import Recipe


def write_gguf_model(
    model: Path,
    adapter: Path | None,
    recipe: Recipe,
    folder: Path,
    file: str,
    progress: Progress,
    converter: str | None = None,
) -> Path:
    """`folder/file`: the model with the adapter merged into it, under the base model's name.

    `converter`: the setting export.converter. Raises as `find_converter` does, and what the task says.
    """
    found = find_converter(converter)
    task = WriteGguf(model, adapter, folder / file, recipe.as_task(), spoken_name(model), found.folder)
    return _write(task, folder, "writing the GGUF file", progress)


def write_gguf_adapter(
    model: Path, adapter: Path, folder: Path, file: str, progress: Progress, converter: str | None = None
) -> Path:
    """`folder/file`: the adapter alone, for llama.cpp's `--lora`. Raises as `write_gguf_model`."""
    task = WriteGgufAdapter(model, adapter, folder / file, find_converter(converter).folder)
    return _write(task, folder, "writing the GGUF adapter", progress)


def _write(task: WriteGguf | WriteGgufAdapter, folder: Path, what: str, progress: Progress) -> Path:
    result = run_task(task, folder, on_beat=count_items(progress, None)).check(what)
    path = task.file
    header = read_header(path)
    if header.is_adapter != isinstance(task, WriteGgufAdapter):
        raise HivetuneError(f"{path} reads back as an adapter: {header.is_adapter}")
    progress(result["tensors"], result["tensors"])
    return path
