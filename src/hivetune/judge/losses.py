"""The loss of both sides on all held-out rows, where both have one over the same tokens; kept by content."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, home, lock, read_json, sha256_file, write_json
from hivetune.base.journal import DAMAGED, Journal, read_journal
from hivetune.judge.artefacts import Artefact
from hivetune.judge.held_out import SIDES, loss_rows
from hivetune.process.parent import count_items, see_off, start_child
from hivetune.process.protocol import Generate, Score
from hivetune.records import Progress
from hivetune.run.choices import read_resolved
from hivetune.run.folder import ADAPTER, CONFIG, SCORES
from hivetune.train.open import Run

NO_ANSWERS = Generate((), 0, 0)  # only the losses
WHOLE = "whole.json"  # written last: without it a folder of scores is begun again


def compared_losses(run: Run | None, sides: Sequence[Artefact], progress: Progress) -> list[dict[str, Any]] | str:
    """Return the `rows` of eval.json, or why these two can't be compared by their loss.

    llama.cpp's server and the chat API do not say how likely a given text is, so a GGUF file and an endpoint have no
    loss.
    """
    if run is None:
        return "rows that are given as a file are not tokenized; name a run with --run for the loss"
    for side in sides:
        if side.trained is None:
            return f"{side.label} is not an adapter on a base that is on this machine, so its loss is unknown"
    models = {sha256_file(side.trained[0] / MANIFEST) for side in sides if side.trained}
    if models != {sha256_file(run.model / MANIFEST)}:
        return "the sides have different base models, so their tokens differ"
    adapters = [side.trained[1] for side in sides if side.trained]
    shared = next((adapter for adapter in adapters if adapter is not None), None)
    lines: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for name, adapter in zip(SIDES, adapters, strict=True):
        # The base is scored beside an adapter, in the precision that the adapter was trained in.
        scores, _ = scored(run, adapter or shared, NO_ANSWERS, progress)
        kind = "base" if adapter is None else "tuned"
        for line in read_journal(scores):
            if line["event"] == "loss" and line["model"] == kind:
                lines[name, "nll", int(line["row"])] = line
    return loss_rows(run.snapshot, lines)


def scored(
    run: Run,
    adapter: Path | None,
    generate: Generate,
    progress: Progress,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Path, Mapping[str, Any]]:
    """Return scores.jsonl of the base and, where there is one, the adapter, with the task's result: found, or made.

    It lies below the home by what it depends on. So a task that failed half-way continues where it was, and the losses
    of a base are computed once for all adapters that were trained alike. `meanwhile` runs beside the task, if there is
    one.
    """
    choices = read_resolved(adapter)[1].made() if adapter and (adapter / CONFIG).is_file() else {}
    base = {
        "model": sha256_file(run.model / MANIFEST),
        "snapshot": run.snapshot.hash,
        "dtype": run.config.dtype,
        "device": run.config.device,
        "computed": {key: choices.get(key) for key in ("device", "dtype", "path", "kernels")},
    }
    pair = {
        **base,
        "adapter": None if adapter is None else sha256_file(adapter / ADAPTER),
        "generate": asdict(generate),
    }
    folder, base_folder = (home() / "scores" / _key(identity) for identity in (pair, base))
    rows = tuple(run.snapshot.rows("test"))
    with lock(folder), lock(base_folder):
        path = folder / SCORES
        if any(line["event"] == DAMAGED for line in read_journal(path)):
            path.unlink()
        if not (folder / WHOLE).is_file() or not path.is_file():
            _copy_losses(base_folder / SCORES, path)
            task = Score(
                run.model, adapter, run.snapshot.folder, path, rows, generate, run.config.dtype, run.config.device
            )
            total = (len(rows) + len(generate.rows)) * (1 if adapter is None else 2)
            num_done = sum(line["event"] in ("loss", "answer") for line in read_journal(path))
            # How far the models differ is computed beside the scoring, row by row: more items than `total`.
            child = start_child(task, folder)
            result = see_off(child, count_items(progress, total, num_done), meanwhile).check("scoring")
            write_json(folder / WHOLE, {**result, "about": pair})
            _copy_losses(path, base_folder / SCORES)
        return path, read_json(folder / WHOLE)


def num_losses(run: Run) -> int:
    """Return the number of rows in `scored`'s progress for a base and its adapter."""
    return 2 * len(run.snapshot.rows("test"))


def _key(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _copy_losses(source: Path, target: Path) -> None:
    """Copy the lines of the base that `target` does not have yet."""
    lines = [line for line in read_journal(source) if line["event"] == "loss" and line["model"] == "base"]
    copied = {line["row"] for line in read_journal(target) if line["event"] == "loss" and line["model"] == "base"}
    missing = [line for line in lines if line["row"] not in copied]
    if missing:
        with Journal(target) as journal:
            for line in missing:
                journal.append("loss", **{key: line[key] for key in ("model", "row", "nll", "tokens")})
