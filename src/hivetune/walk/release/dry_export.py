"""Before a training: can what it will leave be exported and served? Tried with files that have no weights yet.

What llama.cpp says of them it would say of the trained ones: is the architecture known to the version here, does the
adapter belong to the model, are conversations tokenized as they are trained. Kept by what it depends on.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hivetune.base.disk import MANIFEST, home, read_json, scratch_folder, sha256_file, write_json
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.models.architecture import Linear, read_architecture
from hivetune.release.dry import write_dry_export
from hivetune.release.quantize import SERVED_QUANT
from hivetune.serve.llama.backend import ServerSettings, find_engine, open_backend
from hivetune.walk.open import Run
from hivetune.walk.release.export import check_prompts

_FOLDER = "dry-exports"
_SECONDS = 120.0  # no weights are read: a load that takes longer hangs


@dataclass(frozen=True)
class DryExport:
    """Why it can't be written as GGUF, and why llama.cpp can't serve that here; empty where it can. `conversations`:
    how many were compared token by token."""

    unwritten: str = ""
    unserved: str = ""
    conversations: int = 0

    @property
    def problem(self) -> str:
        return self.unwritten or self.unserved


def dry_export(run: Run) -> DryExport:
    """What is known of this model, these targets, data and llama.cpp; found out now where nothing is. 3 s, no torch."""
    lora = run.config.lora
    try:
        linears = read_architecture(run.model).adapted(lora.target_modules)
    except UsageError as error:
        return DryExport(unwritten=_said(error))
    about = {
        "model": sha256_file(run.model / MANIFEST),
        "targets": [linear.name for linear in linears],
        "rank": lora.r,
        "snapshot": run.snapshot.hash,
        "llama.cpp": _engine(),
        "gguf": _version("gguf"),
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = home() / _FOLDER / f"{key}.json"
    if path.is_file():
        return DryExport(**read_json(path))
    with scratch_folder(path.parent) as work:  # of its own: another training may try the same at this moment
        found = _try(run, linears, work / "export")
    if not found.unserved:  # a machine that was too busy to load it may do so the next time
        write_json(path, asdict(found))
    return found


def _try(run: Run, linears: Sequence[Linear], work: Path) -> DryExport:
    try:
        model, adapter = write_dry_export(run.model, linears, run.config.lora.r, SERVED_QUANT, work)
    except (UsageError, MachineNotFit) as error:
        return DryExport(unwritten=_said(error))
    settings = ServerSettings(adapters=((adapter, 0.0),), device="cpu", warm_up=False)
    try:
        with open_backend(model, settings, timeout_s=_SECONDS) as backend:
            return DryExport(conversations=check_prompts(run.folder, backend))
    except HivetuneError as error:
        return DryExport(unserved=_said(error))


def _said(error: HivetuneError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _engine() -> str:
    try:
        program = find_engine("auto")
    except MachineNotFit:
        return ""
    return f"xllamacpp {_version('xllamacpp')}" if program is None else f"{program} {Path(program).stat().st_mtime_ns}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
