"""GGUF files: their number types, and models, adapters and bases that llama.cpp's converter writes in a child."""

import difflib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hivetune.base.disk import (
    MANIFEST,
    home,
    lock,
    problems_once,
    read_json,
    scratch_folder,
    sha256_file,
    write_manifest,
)
from hivetune.base.private import make_folder
from hivetune.errors import MachineNotFit, UsageError
from hivetune.models.prepared import find_prepared, spoken_name
from hivetune.process.parent import count_items, run_task
from hivetune.process.protocol import WriteGguf, WriteGgufAdapter
from hivetune.records import Progress, silent
from hivetune.release.converter import find_converter


class Recipe(NamedTuple):
    """A number type that a GGUF file can be written in, as llama.cpp's tools name it.

    default: the type of matrices. embedding: of token and output embeddings. important: of the layers that a mixture
    spends more on. file_type: llama.cpp's number of the mixture. bits: the size of a weight of `default`.
    """

    name: str
    file_type: int
    default: str
    embedding: str
    bits: float
    important: str | None = None


# Embeddings of a small model are a large part of it and the first thing to suffer: they keep 8 bits, or 6 in K-quants.
RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", 0, "F32", "F32", 32),
        Recipe("f16", 1, "F16", "F16", 16),
        Recipe("bf16", 32, "BF16", "BF16", 16),
        Recipe("q8_0", 7, "Q8_0", "Q8_0", 8.5),
        Recipe("q5_1", 9, "Q5_1", "Q8_0", 6),
        Recipe("q5_0", 8, "Q5_0", "Q8_0", 5.5),
        Recipe("q4_1", 3, "Q4_1", "Q8_0", 5),
        Recipe("q4_0", 2, "Q4_0", "Q8_0", 4.5),
        Recipe("q6_k", 18, "Q6_K", "Q6_K", 6.5625),
        Recipe("q5_k_m", 17, "Q5_K", "Q6_K", 5.5, "Q6_K"),
        Recipe("q4_k_m", 15, "Q4_K", "Q6_K", 4.5, "Q6_K"),
    )
}

SERVED_QUANT = "q8_0"  # what `serve` uses unless told otherwise: half of 16 bits, hardly a difference


def find_recipe(name: str) -> Recipe:
    """Return a number type by its name. Raises UsageError for an unknown one, MachineNotFit without its package."""
    recipe = RECIPES.get(name.lower())
    if recipe is None:
        near = difflib.get_close_matches(name.lower(), RECIPES, 1)
        raise UsageError(
            f"unknown --quant {name}",
            hint=f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RECIPES)}",
        )
    if recipe.default.endswith("_K") and importlib.util.find_spec("libgguf") is None:
        raise MachineNotFit(
            f"--quant {recipe.name} needs the package libgguf", hint="pip install libgguf, or choose --quant q8_0"
        )
    return recipe


def write_gguf_model(
    model: Path,
    adapter: Path | None,
    recipe: Recipe,
    folder: Path,
    file: str,
    progress: Progress,
    converter: str | None = None,
) -> Path:
    """Write `folder/file`: the model with the adapter merged into it, under the base model's name.

    `converter`: the setting export.converter. Raises as `find_converter` does, and UsageError for a model that the
    converter can't write.
    """
    converter_found = find_converter(converter).folder
    task = WriteGguf(model, adapter, folder / file, recipe.name, spoken_name(model), converter_found)
    return _write(task, folder, "writing the GGUF file", progress)


def write_gguf_adapter(
    model: Path, adapter: Path, folder: Path, file: str, progress: Progress, converter: str | None = None
) -> Path:
    """Write `folder/file`: the adapter alone, for llama.cpp's `--lora`. Raises as `write_gguf_model`."""
    task = WriteGgufAdapter(model, adapter, folder / file, find_converter(converter).folder)
    return _write(task, folder, "writing the GGUF adapter", progress)


def _write(task: WriteGguf | WriteGgufAdapter, folder: Path, title: str, progress: Progress) -> Path:
    result = run_task(task, folder, on_beat=count_items(progress, None)).check(title)
    progress(result["tensors"], result["tensors"])
    return task.file


def base_gguf(
    model: str, model_sha256: str, quant: str, progress: Progress = silent, converter: str | None = None
) -> Path:
    """Return `bases/MODEL-HASH-QUANT/MODEL-QUANT.gguf` of a prepared model, written on first use. Adapters are served
    on it.

    `model_sha256` is the hash of the prepared folder's manifest. A base that was upgraded since a release was trained
    on it is not a base of that release, which keeps the file that was written then. Raises UsageError where there is
    none, and as `write_gguf_model`.
    """
    recipe = find_recipe(quant)
    if existing := _find_base(model_sha256, recipe.name):
        return existing
    prepared = find_prepared(model)
    if prepared is None:
        raise UsageError(f"the base model {model} is not prepared here", hint=f"prepare it: hivetune fetch {model}")
    if sha256_file(prepared.folder / MANIFEST) != model_sha256:
        raise UsageError(
            f"the base model {model} is not the one that this release was trained on",
            hint="restore that base, or train on this one",
        )
    folder = home() / "bases" / f"{prepared.folder.name}-{model_sha256[:8]}-{recipe.name}"
    path = folder / f"{prepared.folder.name}-{recipe.name}.gguf"
    with lock(folder.parent), scratch_folder(folder.parent / ".new") as work:
        if existing := _find_base(model_sha256, recipe.name):  # by another process a moment ago
            return existing
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        write_gguf_model(prepared.folder, None, recipe, work, path.name, progress, converter)
        make_folder(work / "base")
        os.rename(work / path.name, work / "base" / path.name)
        write_manifest(work / "base", {"kind": "base", "model": model, "model_sha256": model_sha256})
        os.rename(work / "base", folder)
    return path


def _find_base(model_sha256: str, recipe: str) -> Path | None:
    """Return the undamaged file of a base, whatever its folder was called when it was written."""
    for folder in sorted((home() / "bases").glob(f"*-{model_sha256[:8]}-{recipe}")):
        whole = (folder / MANIFEST).exists() and not problems_once(folder)
        if whole and read_json(folder / MANIFEST).get("model_sha256") == model_sha256:
            return next(folder.glob("*.gguf"), None)
    return None
