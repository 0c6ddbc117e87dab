"""The loss of both sides on the held-out rows, by the training engine, kept below the home."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, home, lock, sha256_file
from hivetune.base.journal import read_journal
from hivetune.data.snapshot import RowInfo, Snapshot
from hivetune.judge.answers import Artefact
from hivetune.judge.rows import evidence_groups
from hivetune.models.sides import SIDES
from hivetune.process.parent import count_items, start_child, wait_for_outcome
from hivetune.process.protocol import Score
from hivetune.records import Progress
from hivetune.run.folder import ADAPTER, CONFIG, SCORES, read_resolved
from hivetune.train.open import Run

BASE = "base"
Losses = Mapping[int, Mapping[str, Any]]  # by row: {"nll", "tokens"}


def compared_losses(run: Run | None, sides: Sequence[Artefact], progress: Progress) -> list[dict[str, Any]] | str:
    """Return the `rows` of eval.json, or the reason why these two sides can't be compared by their loss."""
    # llama.cpp's server and the chat API do not say how likely a given text is: a GGUF file and an endpoint have none.
    if run is None:
        return (
            "rows that are given as a file are not tokenized; without --rows the loss is that of a run's held-out rows"
        )
    for side in sides:
        if side.trained is None:
            return f"{side.label} is not an adapter on a base that is on this machine, so its loss is unknown"
        if sha256_file(side.trained[0] / MANIFEST) != sha256_file(run.model / MANIFEST):
            return "the sides have different base models, so their tokens differ"
    adapters = [side.trained[1] for side in sides if side.trained]
    shared = next((adapter for adapter in adapters if adapter is not None), None)
    found = []
    for adapter in adapters:
        # The base is scored beside an adapter, in the precision that the adapter was trained in.
        path = scored(run, adapter or shared, progress)
        found.append(losses_of(path, side_name(adapter)))
    return loss_rows(run.snapshot, found)


def loss_rows(snapshot: Snapshot, sides: Sequence[Losses]) -> list[dict[str, Any]]:
    """Return eval.json's `rows`, one for each test row, from the losses of base and tuned model.

    The loss of a row that was not scored is null, one that is not finite is "not finite".
    """
    infos = [snapshot.info(row) for row in snapshot.rows("test")]
    groups, rows = evidence_groups(infos), []
    for info in infos:
        row = {**row_identity(info, groups[info.row]), "tokens": None, **dict.fromkeys(SIDES)}
        for side, losses in zip(SIDES, sides, strict=True):
            if (line := losses.get(info.row)) is not None:
                nll = line["nll"]
                finite = isinstance(nll, int | float) and math.isfinite(nll)
                row |= {"tokens": int(line["tokens"]), side: float(nll) if finite else "not finite"}
        rows.append(row)
    return rows


def row_identity(info: RowInfo, group: str) -> dict[str, Any]:
    """Return the fields of eval.json that identify a row."""
    return {**{key: getattr(info, key) for key in ("row", "id", "source", "agent", "category")}, "group": group}


def side_name(adapter: Path | None) -> str:
    """Return the name of a side in the file of losses: BASE, or the hash of the adapter."""
    return BASE if adapter is None else sha256_file(adapter / ADAPTER)


def losses_of(scores: Path, name: str) -> Losses:
    """Return the losses in the file for a side; a damaged line is skipped."""
    lines = (line for line in read_journal(scores) if line["event"] == "loss" and line["model"] == name)
    return {int(line["row"]): line for line in lines}


def is_scored(scores: Path, name: str, rows: Sequence[int]) -> bool:
    """Return whether the file has every loss of a side; if not, all are computed again."""
    return losses_of(scores, name).keys() >= set(rows)


def scored(run: Run, adapter: Path | None, progress: Progress, meanwhile: Callable[[], None] = lambda: None) -> Path:
    """Return the file with the losses of the base and of the adapter, if there is one; missing losses are computed.
    `meanwhile` is called during that, or alone if nothing is missing.
    """
    choices = read_resolved(adapter)[1].as_dict() if adapter and (adapter / CONFIG).is_file() else {}
    # By what losses depend on, so those of a base are computed once for all adapters that were trained alike.
    identity = {
        "model": sha256_file(run.model / MANIFEST),
        "snapshot": run.snapshot.hash,
        "dtype": run.config.dtype,
        "device": run.config.device,
        "computed": {key: choices.get(key) for key in ("device", "dtype", "path", "kernels")},
    }
    folder = home() / "scores" / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path, rows = folder / SCORES, tuple(run.snapshot.rows("test"))
    names = [BASE] if adapter is None else [BASE, side_name(adapter)]
    with lock(folder):
        num_done, total = len(rows) * sum(is_scored(path, name, rows) for name in names), len(rows) * len(names)
        if num_done < total:
            task = Score(run.model, adapter, run.snapshot.folder, path, rows, run.config.dtype, run.config.device)
            wait_for_outcome(start_child(task, folder), count_items(progress, total, num_done), meanwhile).check(
                "scoring"
            )
        else:
            meanwhile()
    return path
