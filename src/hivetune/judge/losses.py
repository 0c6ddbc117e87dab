"""The loss of both sides on the held-out rows, by the training engine. Scores are cached under the home, keyed by their
inputs, so the losses of a base are computed once for all adapters that were trained alike."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, home, lock, sha256_file, write_json
from hivetune.base.journal import DAMAGED, Journal, read_journal
from hivetune.data.snapshot import Snapshot
from hivetune.judge.artefacts import Artefact
from hivetune.judge.rows import evidence_groups
from hivetune.models.sides import SIDES
from hivetune.process.parent import count_items, see_off, start_child
from hivetune.process.protocol import Score
from hivetune.records import Progress
from hivetune.run.folder import ADAPTER, CONFIG, SCORES, read_resolved
from hivetune.train.open import Run

WHOLE = "whole.json"  # written last: without it a folder of scores is begun again
Lines = Mapping[tuple[str, int], Mapping[str, Any]]


def compared_losses(run: Run | None, sides: Sequence[Artefact], progress: Progress) -> list[dict[str, Any]] | str:
    """Return the `rows` of eval.json, or why these two can't be compared by their loss.

    llama.cpp's server and the chat API do not say how likely a given text is, so a GGUF file and an endpoint have no
    loss.
    """
    if run is None:
        return (
            "rows that are given as a file are not tokenized; without --rows the loss is that of a run's held-out rows"
        )
    for side in sides:
        if side.trained is None:
            return f"{side.label} is not an adapter on a base that is on this machine, so its loss is unknown"
    models = {sha256_file(side.trained[0] / MANIFEST) for side in sides if side.trained}
    if models != {sha256_file(run.model / MANIFEST)}:
        return "the sides have different base models, so their tokens differ"
    adapters = [side.trained[1] for side in sides if side.trained]
    shared = next((adapter for adapter in adapters if adapter is not None), None)
    lines: dict[tuple[str, int], Mapping[str, Any]] = {}
    for name, adapter in zip(SIDES, adapters, strict=True):
        # The base is scored beside an adapter, in the precision that the adapter was trained in.
        kind = "base" if adapter is None else "tuned"
        for line in read_journal(scored(run, adapter or shared, progress)):
            if line["event"] == "loss" and line["model"] == kind:
                lines[name, int(line["row"])] = line
    return loss_rows(run.snapshot, lines)


def loss_rows(snapshot: Snapshot, lines: Lines) -> list[dict[str, Any]]:
    """Return eval.json's `rows`, one for each test row. `lines`: (side, row) -> {"nll", "tokens"}.

    A row that was not scored stays with null, one that is not finite with "not finite": the verdict counts both as
    failures.
    """
    infos = [snapshot.info(row) for row in snapshot.rows("test")]
    groups, rows = evidence_groups(infos), []
    for info in infos:
        row = {key: getattr(info, key) for key in ("row", "id", "source", "agent", "category")}
        row |= {"group": groups[info.row], "tokens": None, **dict.fromkeys(SIDES)}
        for side in SIDES:
            if (line := lines.get((side, info.row))) is not None:
                nll = line["nll"]
                finite = isinstance(nll, int | float) and math.isfinite(nll)
                row |= {"tokens": int(line["tokens"]), side: float(nll) if finite else "not finite"}
        rows.append(row)
    return rows


def scored(run: Run, adapter: Path | None, progress: Progress, meanwhile: Callable[[], None] = lambda: None) -> Path:
    """Return scores.jsonl of the base and, where there is one, the adapter: found, or made. A task that failed half-way
    continues where it was. `meanwhile` runs beside the task, if there is one."""
    choices = read_resolved(adapter)[1].made() if adapter and (adapter / CONFIG).is_file() else {}
    base = {
        "model": sha256_file(run.model / MANIFEST),
        "snapshot": run.snapshot.hash,
        "dtype": run.config.dtype,
        "device": run.config.device,
        "computed": {key: choices.get(key) for key in ("device", "dtype", "path", "kernels")},
    }
    pair = {**base, "adapter": None if adapter is None else sha256_file(adapter / ADAPTER)}
    keys = [hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest() for identity in (pair, base)]
    folder, base_folder = (home() / "scores" / key[:16] for key in keys)
    rows = tuple(run.snapshot.rows("test"))
    with lock(folder), lock(base_folder):
        path = folder / SCORES
        if any(line["event"] == DAMAGED for line in read_journal(path)):
            path.unlink()
        if not (folder / WHOLE).is_file() or not path.is_file():
            _copy_losses(base_folder / SCORES, path)
            task = Score(run.model, adapter, run.snapshot.folder, path, rows, run.config.dtype, run.config.device)
            num_done = sum(line["event"] == "loss" for line in read_journal(path))
            child = start_child(task, folder)
            total = len(rows) * (1 if adapter is None else 2)
            see_off(child, count_items(progress, total, num_done), meanwhile).check("scoring")
            write_json(folder / WHOLE, {"about": pair})
            _copy_losses(path, base_folder / SCORES)
    return path


def _copy_losses(source: Path, target: Path) -> None:
    """Copy the lines of the base that `target` does not have yet."""
    lines = [line for line in read_journal(source) if line["event"] == "loss" and line["model"] == "base"]
    copied = {line["row"] for line in read_journal(target) if line["event"] == "loss" and line["model"] == "base"}
    missing = [line for line in lines if line["row"] not in copied]
    if missing:
        with Journal(target) as journal:
            for line in missing:
                journal.append("loss", **{key: line[key] for key in ("model", "row", "nll", "tokens")})
