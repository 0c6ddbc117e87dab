"""The dry export: an adapter that has learned nothing, and its model, as GGUF files with holes instead of weights.

Everything that an export can refuse is in names, types, shapes, settings and words, so it is refused before a training
and not after it. llama.cpp loads the two files as it would load the real ones. They take no room on the disk.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_json
from hivetune.base.private import make_folder
from hivetune.models.architecture import Linear
from hivetune.models.peft_names import names_of
from hivetune.process.parent import run_task
from hivetune.process.protocol import DryGguf
from hivetune.release.quantize import find_recipe
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG


def write_dry_export(model: Path, linears: Sequence[Linear], rank: int, quant: str, folder: Path) -> tuple[Path, Path]:
    """(model, adapter) below `folder`: `linears` of the model with an adapter of `rank`.

    Raises what exporting a trained one would: UsageError for a model that GGUF can't hold, MachineNotFit for a missing
    package.
    """
    recipe = find_recipe(quant)
    _write_untrained(folder / "adapter", linears, rank)
    task = DryGguf(model, folder / "adapter", folder / "model.gguf", folder / "adapter.gguf", recipe.as_task())
    run_task(task, folder).check("the dry export")
    return task.file, task.adapter_file


def _write_untrained(folder: Path, linears: Sequence[Linear], rank: int) -> None:
    """PEFT's two files. The weights are a header and a hole: zeros, which nobody reads."""
    make_folder(folder)
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for linear, names in zip(linears, names_of(linears), strict=True):
        for name, shape in zip(names, linear.adapter_shapes(rank), strict=True):
            size_bytes = 4 * shape[0] * shape[1]
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size_bytes]}
            end += size_bytes
    text = json.dumps(header).encode()
    with open(folder / ADAPTER, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    experts = sorted({linear.name for linear in linears if linear.experts > 1})
    write_json(folder / ADAPTER_CONFIG, {**config, "target_parameters": experts} if experts else config)
