"""A base model as one GGUF file without adapters, made once per model and number type: what adapters are served on."""

import os
import shutil
from pathlib import Path

from hivetune.base.disk import MANIFEST, home, lock, read_json, sha256_file, write_manifest
from hivetune.base.private import make_folder
from hivetune.base.whole import problems_once
from hivetune.errors import UsageError
from hivetune.models.prepared import find_prepared
from hivetune.records import Progress, silent
from hivetune.release.gguf import write_gguf_model
from hivetune.release.quantize import find_recipe


def base_gguf(
    model: str, model_sha256: str, quant: str, progress: Progress = silent, converter: str | None = None
) -> Path:
    """`bases/MODEL-HASH-QUANT/MODEL-QUANT.gguf` of a prepared model: found, or made.

    `model_sha256` is that of the prepared folder's manifest. A base that was upgraded since a release was trained on it
    is no base of that release, which goes on with the file that was made then. Raises UsageError where there is none,
    and what writing a GGUF file raises.
    """
    recipe = find_recipe(quant)
    made = _made(model_sha256, recipe.name)
    if made is not None:
        return made
    prepared = find_prepared(model)
    if prepared is None:
        raise UsageError(f"the base model {model} is not prepared here", hint=f"hivetune fetch {model}")
    if sha256_file(prepared.folder / MANIFEST) != model_sha256:
        raise UsageError(
            f"the base model {model} is not the one that this release was trained on",
            hint="train on the present base, or restore the old one",
        )
    folder = home() / "bases" / f"{prepared.folder.name}-{model_sha256[:8]}-{recipe.name}"
    path = folder / f"{prepared.folder.name}-{recipe.name}.gguf"
    with lock(folder.parent):
        made = _made(model_sha256, recipe.name)  # by another process, meanwhile
        if made is not None:
            return made
        work, task = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "task"))
        for leftover in (work, task, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        make_folder(work)
        try:
            written = write_gguf_model(prepared.folder, None, recipe, task, path.name, progress, converter)
            os.rename(written, work / path.name)
            write_manifest(work, {"kind": "base", "model": model, "model_sha256": model_sha256})
            os.rename(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(task, ignore_errors=True)
    return path


def _made(model_sha256: str, recipe: str) -> Path | None:
    """The whole file that was made of a base, whatever its folder was called then."""
    for folder in sorted((home() / "bases").glob(f"*-{model_sha256[:8]}-{recipe}")):
        whole = (folder / MANIFEST).exists() and not problems_once(folder)
        if whole and read_json(folder / MANIFEST).get("model_sha256") == model_sha256:
            return next(folder.glob("*.gguf"), None)
    return None
