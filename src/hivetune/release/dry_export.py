"""The dry export: before a training, a small random model of the same architecture is converted, served and compared.

It shows in seconds what the converter, llama.cpp or an adapter's targets make impossible or wrong, and whether
llama.cpp tokenizes conversations as they are trained. The result depends on the architecture, the tokenizer, the
targets and the versions, not on weights or rows. So it is kept in the home, and the next run of such a model reads it.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hivetune.base.disk import MANIFEST, home, read_json, scratch_folder, write_json
from hivetune.errors import Busy, DataRefused, DoesNotFit, HivetuneError, MachineNotFit, UsageError
from hivetune.llama.backend import ServerSettings, find_engine, open_backend
from hivetune.llama.prompts import CHECKED_PROMPTS, HELD_OUT_FIRST, check_prompts
from hivetune.models.architecture import Linear, named_end, read_architecture
from hivetune.models.prepared import DESCRIPTION
from hivetune.process.parent import run_task
from hivetune.process.protocol import DryGguf, Passage
from hivetune.release.gguf import Converter, find_converter, server_name, untested_pair
from hivetune.release.prove import TOP, Scores, choose_passages, compare_scores, score_passages
from hivetune.train.open import Run

_FOLDER = "dry-exports"
_START_SECONDS = 120.0  # the model is small: a load that takes longer hangs
PASSAGES = 3
RANK = 8  # of the adapter that is tried; a rank changes shapes, nothing that can fail


@dataclass(frozen=True)
class DryExport:
    """The result of a dry export.

    unwritten: why the model can't be written as GGUF. unserved: why llama.cpp can't serve the GGUF here. Both are empty
    where it works. conversations: how many were compared token by token when it was tried.
    """

    unwritten: str = ""
    unserved: str = ""
    conversations: int = 0

    @property
    def problem(self) -> str:
        return self.unwritten or self.unserved


def dry_export(run: Run) -> DryExport:
    """Return the known result for this kind of model and rows, or try it now.

    Raises DoesNotFit on a full disk. Any other failure is part of the result: the training itself can continue.
    """
    try:
        converter = find_converter()
        linears = read_architecture(run.model).adapted(run.config.lora.target_modules)
    except (UsageError, MachineNotFit) as error:
        return DryExport(unwritten=_error_text(error))
    # Longer conversations can't be asked everywhere: where llama.cpp has no window of attention, the context is cut.
    settings = read_json(run.model / "config.json")
    lengths = (settings.get("sliding_window"), settings.get("max_position_embeddings"))
    window = min((length for length in lengths if isinstance(length, int) and length > 0), default=None)
    try:
        passages = choose_passages(run.snapshot, window)[:PASSAGES]
    except DataRefused as error:
        return DryExport(unserved=f"{error.message}: llama.cpp can't be asked longer ones of this model")
    path = home() / _FOLDER / f"{_key(run, linears, converter)}.json"
    if path.is_file():
        return DryExport(**read_json(path))
    with scratch_folder(path.parent) as work:  # of its own: another training may try the same at this moment
        result = _try(run, linears, converter, passages, work / "export")
        if not result.unserved:  # a machine that was too busy to load the file may do so the next time
            write_json(work / path.name, asdict(result))
            os.replace(work / path.name, path)
    return result


def _key(run: Run, linears: Sequence[Linear], converter: Converter) -> str:
    """Return a hash of all that the result depends on. A template may branch on roles and tools, so the kinds of turns
    count; the words in them do not."""
    files: Mapping[str, Mapping[str, object]] = read_json(run.model / MANIFEST)["files"]
    # The description holds the name that the model was fetched with; what it says of tokens is read from the others.
    described = {name: file["sha256"] for name, file in files.items() if ".safetensors" not in name}
    described.pop(DESCRIPTION, None)
    rows = [row for split in HELD_OUT_FIRST for row in run.snapshot.rows(split)]
    infos = [run.snapshot.info(row) for row in rows[:CHECKED_PROMPTS]]
    turns = {f"{turn.role}{' with calls' if turn.tool_calls else ''}" for info in infos for turn in info.messages}
    facts = {
        "model": described,
        "targets": [linear.name for linear in linears],
        "turns": sorted(turns | ({"tools"} if any(info.tools for info in infos) else set())),
        "llama.cpp": _server(),
        "converter": converter.name,
        "versions": [importlib.metadata.version(name) for name in ("hivetune", "transformers", "torch")],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _try(
    run: Run, linears: Sequence[Linear], converter: Converter, passages: Sequence[Passage], work: Path
) -> DryExport:
    try:
        task, trained = write_dry_export(run.model, linears, converter, passages, work)
    except (DoesNotFit, Busy):
        raise
    except HivetuneError as error:
        return DryExport(unwritten=_error_text(error))
    settings = ServerSettings(adapters=((task.adapter_file, 0.0),), device="cpu", warm_up=False)
    try:
        with open_backend(task.file, settings, timeout_s=_START_SECONDS) as backend:
            base, _ = score_passages(backend, passages)
            tuned, _ = score_passages(backend, passages, adapter=0)
            check_dry_export(trained, base, tuned)
            return DryExport(conversations=check_prompts(backend, run.model, run.snapshot))
    except HivetuneError as error:
        return DryExport(unserved="; ".join([_error_text(error), *untested_pair(converter.name, _server())]))


def write_dry_export(
    model: Path, linears: Sequence[Linear], converter: Converter, passages: Sequence[Passage], folder: Path
) -> tuple[DryGguf, Mapping[str, Scores]]:
    """Write a small model and an adapter on the modules of `linears` as GGUF files below `folder`; return the task that
    names them, and the scores of "base" and "tuned" by transformers.

    Raises what exporting a trained one would: UsageError for a model that the converter can't write, MachineNotFit for
    a missing package.
    """
    task = DryGguf(
        model=model,
        targets=tuple(sorted({named_end(linear.name) for linear in linears})),
        rank=RANK,
        file=folder / "model.gguf",
        adapter_file=folder / "adapter.gguf",
        converter=converter.folder,
        passages=tuple(passages),
        top=TOP,
    )
    return task, run_task(task, folder).check("the dry export")


def check_dry_export(trained: Mapping[str, Scores], base: Scores, tuned: Scores) -> None:
    """Raise HivetuneError where llama.cpp computes another model, or not all of the adapter."""
    problems = compare_scores("f32", {"base": trained["base"], "tuned": trained["base"]}, base, None)["problems"]
    if problems:
        raise HivetuneError(f"llama.cpp and transformers compute different results: {'; '.join(problems)}")
    problems = compare_scores("f32", trained, tuned, None)["problems"]
    if problems:
        raise HivetuneError(f"llama.cpp applies this adapter differently from training: {'; '.join(problems)}")


def _error_text(error: HivetuneError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _server() -> str:
    try:
        return server_name(find_engine("auto"))
    except MachineNotFit:
        return ""
