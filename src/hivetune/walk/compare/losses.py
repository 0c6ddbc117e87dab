"""The loss of both sides on all held-out rows, where both have one over the same tokens; kept by content."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, home, lock, read_json, sha256_file, write_json
from hivetune.base.journal import DAMAGED, read_journal
from hivetune.judge.evaluate import SIDES, loss_rows
from hivetune.process.parent import run_task
from hivetune.process.protocol import Beat, Generate, Score
from hivetune.records import Progress
from hivetune.run.folder import ADAPTER, SCORES
from hivetune.walk.compare.artefacts import Artefact
from hivetune.walk.open import Run

WHOLE = "whole.json"  # written last: without it a folder of scores is begun again


def compared_losses(run: Run | None, sides: Sequence[Artefact], progress: Progress) -> list[dict[str, Any]] | str:
    """The `rows` of eval.json, or why these two can't be compared by their loss.

    llama.cpp's server and the chat API do not say how likely a given text is, so a GGUF file and an endpoint have none.
    """
    if run is None:
        return "rows that are given as a file are not tokenized; name a run with --run for the loss"
    for side in sides:
        if side.trained is None:
            return f"{side.label} is not a base with an adapter of this machine, so its loss is unknown"
    models = {sha256_file(side.trained[0] / MANIFEST) for side in sides if side.trained}
    if models != {sha256_file(run.model / MANIFEST)}:
        return "the sides have different base models, so their tokens differ"
    adapters = [side.trained[1] for side in sides if side.trained]
    shared = next((adapter for adapter in adapters if adapter is not None), None)
    found: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for name, adapter in zip(SIDES, adapters, strict=True):
        # The base is scored beside an adapter, in the precision that the adapter was trained in.
        scores = _scores(run, adapter or shared, progress)
        kind = "base" if adapter is None else "tuned"
        for line in read_journal(scores):
            if line["event"] == "loss" and line["model"] == kind:
                found[name, "nll", int(line["row"])] = line
    return loss_rows(run.snapshot, found)


def _scores(run: Run, adapter: Path | None, progress: Progress) -> Path:
    """scores.jsonl of the base and, where there is one, the adapter: found, or made by a task of the engine."""
    about = {
        "model": sha256_file(run.model / MANIFEST),
        "adapter": None if adapter is None else sha256_file(adapter / ADAPTER),
        "snapshot": run.snapshot.hash,
        "dtype": run.config.dtype,
        "device": run.config.device,
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    folder = home() / "scores" / key[:16]
    rows = tuple(run.snapshot.rows("test"))
    with lock(folder):
        path = folder / SCORES
        if (folder / WHOLE).is_file() and read_json(folder / WHOLE) == about and not _damaged(path):
            return path
        total, done = len(rows) * (1 if adapter is None else 2), 0

        def on_beat(beat: Beat) -> None:
            nonlocal done
            if beat is Beat.ITEM:
                done += 1
                progress(min(done, total), total)

        none = Generate((), run.config.eval.new_tokens, run.config.eval.slots)
        task = Score(run.model, adapter, run.snapshot.folder, path, rows, none, run.config.dtype, run.config.device)
        run_task(task, folder, on_beat=on_beat).check("computing the losses")
        write_json(folder / WHOLE, about)
    return path


def _damaged(scores: Path) -> bool:
    return any(line["event"] == DAMAGED for line in read_journal(scores))
