"""Before a training: can what it will leave be exported and served? Tried with a small model of its architecture.

Is the architecture known to converter and server here, do both compute it and the adapter as transformers does, are
conversations tokenized as they are trained. Kept by what it depends on.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hivetune.base.disk import MANIFEST, home, read_json, scratch_folder, sha256_file, write_json
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, MachineNotFit, UsageError
from hivetune.llama.backend import ServerSettings, find_engine, open_backend
from hivetune.models.architecture import Linear, read_architecture
from hivetune.release.converter import Converter, find_converter, server_name, untested_pair
from hivetune.release.dry import check_dry_export, write_dry_export
from hivetune.release.prove import TOP, choose_passages
from hivetune.release.station import check_prompts
from hivetune.release.told import tell_passages
from hivetune.train.open import Run

_FOLDER = "dry-exports"
_SECONDS = 120.0  # the model is small: a load that takes longer hangs
PASSAGES = 3


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
    """What is known of this model, these targets, data, converter and llama.cpp; tried now where nothing is."""
    lora = run.config.lora
    try:
        converter = find_converter(run.config.export.converter)
        linears = read_architecture(run.model).adapted(lora.target_modules)
    except (UsageError, MachineNotFit) as error:
        return DryExport(unwritten=_said(error))
    about = {
        "model": sha256_file(run.model / MANIFEST),
        "targets": [linear.name for linear in linears],
        "rank": lora.r,
        "snapshot": run.snapshot.hash,
        "llama.cpp": _server(),
        "converter": converter.name,
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = home() / _FOLDER / f"{key}.json"
    if path.is_file():
        return DryExport(**read_json(path))
    with scratch_folder(path.parent) as work:  # of its own: another training may try the same at this moment
        found = _try(run, linears, converter, work / "export")
        if not found.unserved:  # a machine that was too busy to load it may do so the next time
            write_json(work / path.name, asdict(found))
            os.replace(work / path.name, path)
    return found


def _try(run: Run, linears: Sequence[Linear], converter: Converter, work: Path) -> DryExport:
    try:
        passages = choose_passages(run.snapshot, _window(run))[:PASSAGES]
    except DataRefused as error:
        return DryExport(unserved=f"{error.message}: llama.cpp serves no longer ones of this model")
    try:
        written, trained = write_dry_export(run.model, linears, run.config.lora.r, converter, passages, work)
    except (DoesNotFit, Busy):
        raise
    except HivetuneError as error:  # whatever it is, the training itself can go on
        return DryExport(unwritten=_said(error))
    settings = ServerSettings(adapters=((written.adapter_file, 0.0),), device="cpu", warm_up=False)
    try:
        with open_backend(written.file, settings, timeout_s=_SECONDS) as backend:
            base, _ = tell_passages(backend, passages, slots=1, top=TOP)
            tuned, _ = tell_passages(backend, passages, slots=1, top=TOP, adapter=0)
            check_dry_export(trained, base, tuned)
            return DryExport(conversations=check_prompts(run.folder, backend))
    except HivetuneError as error:
        pair = untested_pair(converter.name, _server())
        return DryExport(unserved=_said(error) + (f"; {pair}" if pair else ""))


def _window(run: Run) -> int | None:
    """The longest conversation that every llama.cpp can be asked of this model: its context is cut to the window where
    llama.cpp has none."""
    config = read_json(run.model / "config.json")
    lengths = (config.get("sliding_window"), config.get("max_position_embeddings"))
    return min((length for length in lengths if isinstance(length, int) and length > 0), default=None)


def _said(error: HivetuneError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _server() -> str:
    try:
        return server_name(find_engine("auto"))
    except MachineNotFit:
        return ""
