"""The exports of a trained run to formats that other programs load: PEFT adapter, merged model, GGUF, GGUF adapter.

    RUN/export/adapter/       adapter_config.json, adapter_model.safetensors, tokenizer, chat template
    RUN/export/merged/        a transformers folder
    RUN/export/gguf-QUANT/    NAME-QUANT.gguf, and a Modelfile for Ollama
    RUN/export/gguf-adapter/  NAME-lora.gguf, for llama.cpp's --lora beside the base model as GGUF

Each has a README.md. An export of the same adapter is reused, not written again.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hivetune.base.disk import MANIFEST, lock, problems_since_last_read, publish, read_json, sha256_file, write_json
from hivetune.base.paths import quoted
from hivetune.base.private import check_owner
from hivetune.data.render.template import fixed_date
from hivetune.errors import UsageError
from hivetune.models.prepared import DESCRIPTION, TEMPLATE, display_name, read_prepared
from hivetune.process.parent import run_task
from hivetune.process.protocol import Merge
from hivetune.records import Progress, silent
from hivetune.release.gguf import find_quant, write_gguf
from hivetune.run.folder import (
    ADAPTER,
    ADAPTER_CONFIG,
    EVALUATION,
    EXPORTS,
    PROOF,
    RECORD,
    adapter_hash,
    read_record,
    refuse_copied_home,
    require_adapter,
)

DEFAULT_QUANT = "f16"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "generation_config.json")
CARD, MODELFILE = "README.md", "Modelfile"
# What loads an export, by its kind.
LOADED_BY: Mapping[str, str] = {
    "adapter": "PeftModel.from_pretrained(base, {path})",
    "merged": "vllm serve {path}",
    "gguf": "hivetune chat {path}",
    "gguf-adapter": "llama-server --model BASE.gguf --lora {path}",
}


@dataclass(frozen=True)
class Exported:
    """An export. `path`: the file for GGUF, else the folder. `made`: True if it was written now, False if it
    existed."""

    to: str
    path: Path
    folder: Path
    size_bytes: int
    made: bool


def export_run(run: Path, to: str, *, quant: str = DEFAULT_QUANT, progress: Progress = silent) -> Exported:
    """Export the newest adapter of a run folder to `RUN/export/`.

    Raises UsageError for an unknown target or quantization, a run without adapter or of another home, and a model that
    the format can't represent; MachineNotFit for a missing package; DoesNotFit for a full disk (incomplete files are
    deleted); Busy while another export runs.
    """
    if to not in LOADED_BY:
        raise UsageError(f"unknown format --to {to}", hint=f"choose one of {', '.join(LOADED_BY)}")
    try:
        check_owner(run)
    except FileNotFoundError:
        raise UsageError(f"{run} is not a run folder", hint="see the runs: hivetune runs") from None
    record = read_record(run)
    model = Path(record["model"])
    require_adapter(run)
    number_type = find_quant(quant) if to == "gguf" else None
    folder = run / EXPORTS / (f"{to}-{number_type}" if number_type else to)
    identity = {
        "kind": "export",
        "to": to,
        "quant": number_type,
        "adapter_sha256": adapter_hash(run),
        "model_sha256": sha256_file(model / MANIFEST),
    }
    if problems := problems_since_last_read(model):
        raise UsageError(f"the base model is damaged: {model / problems[0]}", hint="get it again: hivetune fetch MODEL")
    is_new = not _is_written(folder, identity)
    if is_new:
        refuse_copied_home(run, f"hivetune export {quoted(run)} --to {to}")
        with lock(folder.parent):
            is_new = not _is_written(folder, identity)  # by another process a moment ago
            if is_new:
                _write(run, record, folder, identity, progress)
    file = next(iter(sorted(folder.glob("*.gguf"))), None)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != PROOF)
    return Exported(to, file or folder, folder, size_bytes, is_new)


def run_of_export(file: Path) -> Path | None:
    """Return the run that `file` was exported from; None if the file is not in a run's folder."""
    parents = file.resolve().parents
    if len(parents) > 2 and parents[1].name == EXPORTS and (parents[2] / RECORD).exists():
        return parents[2]
    return None


def _is_written(folder: Path, identity: Mapping[str, Any]) -> bool:
    return not problems_since_last_read(folder) and identity.items() <= read_json(folder / MANIFEST).items()


def _write(run: Path, record: Mapping[str, Any], folder: Path, identity: Mapping[str, Any], progress: Progress) -> None:
    to, model, more, path = identity["to"], Path(record["model"]), dict[str, Any](), "."
    # Written aside, with the manifest last, and then renamed: an export is whole or not there. A task gets a folder of
    # its own, so that its logs are no part of it.
    work, task = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "task"))
    for leftover in (work, task):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        if to == "merged":
            outcome = run_task(Merge(model, run, work), task, on_beat=lambda beat: progress(0, None))
            more = dict(outcome.check("merging"))
        elif to == "adapter":
            _copy_adapter(run, model, work)
        else:
            work.mkdir()
            path = f"{Path(record['name']).name}-{identity['quant'] or 'lora'}.gguf"
            write_gguf(model, run, identity["quant"], task, path, progress).rename(work / path)
            if to == "gguf":
                (work / MODELFILE).write_text(_modelfile(model, path), encoding="utf-8")
        if (template := work / TEMPLATE).is_file():
            template.write_text(fixed_date(template.read_text(encoding="utf-8")), encoding="utf-8")
        (work / CARD).write_text(_card(run, record, to, path), encoding="utf-8")
        publish(work, folder, {**identity, **more})
    except UsageError as error:  # what GGUF or llama.cpp can't hold
        hint = error.hint or "export the adapter alone, which PEFT loads beside its base: --to adapter"
        raise UsageError(error.message, hint=hint) from None
    finally:
        for leftover in (work, task):
            shutil.rmtree(leftover, ignore_errors=True)


def _copy_adapter(run: Path, model: Path, work: Path) -> None:
    """Copy the adapter, with its base's public name instead of a path, and the base's tokenizer."""
    work.mkdir()
    shutil.copyfile(run / ADAPTER, work / ADAPTER)
    base, revision = _portable_base(model)
    config = read_json(run / ADAPTER_CONFIG)
    write_json(work / ADAPTER_CONFIG, {**config, "base_model_name_or_path": base, "revision": revision})
    for name in TOKENIZER_FILES:
        if (model / name).exists():
            shutil.copyfile(model / name, work / name)


def _modelfile(model: Path, file: str) -> str:
    """Return the `Modelfile` for a GGUF file, for `ollama create NAME -f Modelfile`."""
    # Ollama knows the common chat templates by the one in the file. The ends are named, since it takes only one from
    # there.
    texts = {number: text for text, number in Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab().items()}
    ends = [texts[number] for number in read_prepared(model).eos_ids if number in texts]
    return "\n".join([f"FROM ./{file}", *(f"PARAMETER stop {json.dumps(end)}" for end in ends), ""])


def _portable_base(model: Path) -> tuple[str, str | None]:
    """Return the base's public name as (Hub id, commit), or as (name without a path, None)."""
    described = read_json(model / DESCRIPTION)
    if described.get("kind") == "hub":
        return described["source"], described.get("revision")
    return display_name(model), None


def _card(run: Path, record: Mapping[str, Any], to: str, file: str) -> str:
    """Return the text of README.md, whose front matter the Hugging Face Hub reads. It names nothing of this machine."""
    base, revision = _portable_base(Path(record["model"]))
    judged = read_json(run / EVALUATION) if (run / EVALUATION).is_file() else {}
    rows = (record.get("result") or {}).get("rows") or {}
    counts = (f"{rows[key]:,} {words}" for key, words in _COUNTED.items() if key in rows)
    return _CARD.format(
        base=base,
        library="peft" if to == "adapter" else "transformers",
        name=Path(record["name"]).name,
        described=f"{base}{f' at {revision}' if revision else ''}",
        rows=", ".join(counts) or "not known",
        verdict=judged.get("verdict", "not judged when it was exported"),
        loaded_by=LOADED_BY[to].format(path=file),
    )


_COUNTED = {"rows_in": "read", "trained": "trained", "held_out": "held out"}
_CARD = """\
---
base_model: "{base}"
library_name: "{library}"
pipeline_tag: "text-generation"
tags: ["hivetune", "lora"]
---

# {name}

A low-rank adapter of {described}.

- Rows: {rows}
- Verdict: {verdict}
- Loaded by: `{loaded_by}`
- Licence: that of {base}; the rows' owners may set further terms.
"""
