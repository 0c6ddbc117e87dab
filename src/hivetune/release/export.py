"""A trained run in the form that others load: PEFT adapter, merged model, GGUF, GGUF adapter, Ollama.

    RUN/export/adapter/       adapter_config.json, adapter_model.safetensors, tokenizer, chat template
    RUN/export/merged/        a transformers folder
    RUN/export/gguf-QUANT/    NAME-QUANT.gguf
    RUN/export/gguf-adapter/  NAME-lora.gguf, for llama.cpp's --lora beside the base model as GGUF
    RUN/export/ollama-QUANT/  NAME-QUANT.gguf and a Modelfile

Each folder is made aside, gets its manifest last and is then renamed: it is whole or not there. An export of the same
adapter is found again and not made twice.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hivetune.base.disk import MANIFEST, lock, read_json, sha256_file, write_json, write_manifest
from hivetune.base.private import check_own
from hivetune.base.whole import problems_once
from hivetune.errors import DoesNotFit, UsageError
from hivetune.models.prepared import TEMPLATE
from hivetune.process.parent import run_task
from hivetune.process.protocol import Merge
from hivetune.records import Progress, silent
from hivetune.release.card import portable_base, write_card
from hivetune.release.gguf import write_gguf_adapter, write_gguf_model
from hivetune.release.ollama import write_modelfile
from hivetune.release.prove import PROOF
from hivetune.release.quantize import Recipe, find_recipe
from hivetune.run.adapter import adapter_hash, require_adapter
from hivetune.run.choices import read_resolved
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG, CONFIG, EXPORTS
from hivetune.run.record import read_record

ExportFormat = Literal["adapter", "merged", "gguf", "gguf-adapter", "ollama"]
MergedType = Literal["source", "float16", "float32"]
QUANTIZED: tuple[ExportFormat, ...] = ("gguf", "ollama")  # written in a number type that is chosen
DEFAULT_QUANT = "f16"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "generation_config.json")
EXPORT_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Exported:
    """`path` is what to give to others: a file for GGUF, else the folder. `made` is False when it was there already."""

    to: ExportFormat
    path: Path
    folder: Path
    size_bytes: int
    made: bool


@dataclass(frozen=True)
class Source:
    """What is exported: an adapter (any PEFT folder) of a prepared model, under a name. `run`: the run that trained it;
    `converter`: the setting export.converter."""

    adapter: Path
    model: Path
    name: str
    converter: str | None = None
    run: Path | None = None


def export_run(
    run: Path, to: str, *, quant: str = DEFAULT_QUANT, dtype: MergedType = "source", progress: Progress = silent
) -> Exported:
    """Export the adapter at the top of a run folder to `RUN/export/`. `dtype`: of merged weights; "source": the base's.

    Raises UsageError for an unknown target or quantization, a run without adapter and a model that the target can't
    hold; MachineNotFit for a missing package; DoesNotFit when the disk is too small; Busy while another export runs.
    """
    try:
        check_own(run)
    except FileNotFoundError:
        raise UsageError(f"{run} is not a run folder", hint="see the runs: hivetune runs") from None
    record = read_record(run)
    converter = read_resolved(run)[0].export.converter if (run / CONFIG).is_file() else None
    source = Source(run, Path(record["model"]), Path(record["name"]).name, converter, run)
    return export(source, run / EXPORTS, to, quant=quant, dtype=dtype, progress=progress)


def export(
    source: Source,
    parent: Path,
    to: str,
    *,
    quant: str = DEFAULT_QUANT,
    dtype: MergedType = "source",
    progress: Progress = silent,
) -> Exported:
    """Export any adapter folder, a trained one or one that has learned nothing yet. Raises as `export_run`."""
    if to not in get_args(ExportFormat):
        raise UsageError(f"unknown --to {to}", hint=f"choose one of {', '.join(get_args(ExportFormat))}")
    require_adapter(source.adapter)
    recipe = find_recipe(quant) if to in QUANTIZED else None
    folder = parent / (f"{to}-{recipe.name}" if recipe else to)
    identity = {
        "kind": "export",
        "to": to,
        "quant": recipe.name if recipe else None,
        **({"dtype": dtype} if to == "merged" and dtype != "source" else {}),
        "adapter_sha256": adapter_hash(source.adapter),
        "model_sha256": sha256_file(source.model / MANIFEST),
    }
    problems = problems_once(source.model)
    if problems:
        raise UsageError(
            f"the model is damaged: {source.model / problems[0]}", hint="get it again: hivetune fetch MODEL"
        )
    with lock(parent):
        if not _is_there(folder, identity):
            _check_disk(source, parent, recipe, to)
            _make(source, folder, recipe, identity, progress)
            made = True
        else:
            made = False
    main_file = next(iter(sorted(folder.glob("*.gguf"))), None)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != PROOF)
    target: ExportFormat = identity["to"]  # type: ignore[assignment]
    return Exported(target, main_file if main_file and to != "ollama" else folder, folder, size_bytes, made)


def _is_there(folder: Path, identity: Mapping[str, Any]) -> bool:
    if not (folder / MANIFEST).exists() or problems_once(folder):
        return False
    known = read_json(folder / MANIFEST)
    return all(known.get(key) == value for key, value in identity.items())


def merged_type(folder: Path) -> MergedType:
    """What the weights of a merged export are rounded to."""
    kind: MergedType = read_json(folder / MANIFEST).get("dtype", "source")
    return kind


def _make(source: Source, folder: Path, recipe: Recipe | None, identity: Mapping[str, Any], progress: Progress) -> None:
    work = folder.with_name(f".{folder.name}.tmp")
    task = folder.with_name(f".{folder.name}.task")
    for leftover in (work, task):
        shutil.rmtree(leftover, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        try:
            _write(source, work, task, recipe, identity, progress)
            write_card(work, source.name, source.model, source.run, str(identity["to"]))
        except UsageError as error:  # what GGUF or llama.cpp can't hold
            if error.hint or identity["to"] in ("adapter", "merged"):
                raise
            raise UsageError(error.message, hint="every model can be exported as a folder: --to merged") from None
        write_manifest(work, dict(identity))
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(task, ignore_errors=True)


def _write(
    source: Source, work: Path, task: Path, recipe: Recipe | None, identity: Mapping[str, Any], progress: Progress
) -> None:
    """Fill `work`. Tasks get a folder of their own, so that their logs do not ship."""
    to = identity["to"]
    if to == "adapter":
        shutil.copyfile(source.adapter / ADAPTER, work / ADAPTER)
        base, revision = portable_base(source.model)
        config = read_json(source.adapter / ADAPTER_CONFIG)
        write_json(work / ADAPTER_CONFIG, {**config, "base_model_name_or_path": base, "revision": revision})
        _copy_tokenizer(source.model, work)
    elif to == "merged":
        merged = Merge(source.model, source.adapter, task / "merged", str(identity.get("dtype", "source")))
        run_task(merged, task, on_beat=lambda beat: progress(0, None)).check("merging")
        for path in merged.target.iterdir():
            if path.name != MANIFEST:
                os.rename(path, work / path.name)
    elif to == "gguf-adapter":
        path = write_gguf_adapter(
            source.model, source.adapter, task, f"{source.name}-lora.gguf", progress, source.converter
        )
        os.rename(path, work / path.name)
    else:
        assert recipe is not None
        file = f"{source.name}-{recipe.name}.gguf"
        path = write_gguf_model(source.model, source.adapter, recipe, task, file, progress, source.converter)
        os.rename(path, work / path.name)
        if to == "ollama":
            write_modelfile(source.model, work / file)


def _copy_tokenizer(model: Path, work: Path) -> None:
    for name in TOKENIZER_FILES:
        if (model / name).exists():
            shutil.copyfile(model / name, work / name)


def _check_disk(source: Source, parent: Path, recipe: Recipe | None, to: str) -> None:
    weights = sum(path.stat().st_size for path in source.model.glob("*.safetensors"))
    share = {"adapter": 0.0, "gguf-adapter": 0.0, "merged": 2.0}.get(to, 1.0)  # merged: in float32 at most
    if recipe is not None:
        share = max(recipe.bits, 8.5 if recipe.bits < 16 else 0) / 16  # embeddings keep 8 bits at least
    needed = int(weights * share) + EXPORT_SPARE_BYTES
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise DoesNotFit(
            f"the export needs about {needed / 1e6:,.0f} MB, {parent} has {free / 1e6:,.0f} MB free",
            hint="free some space, or choose a smaller --quant",
        )
