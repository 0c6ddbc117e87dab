"""Several adapters on the same rows: one child, kept by what it depends on."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.base.journal import read_journal
from hivetune.experts.survey import Survey
from hivetune.process.parent import count_items, run_task
from hivetune.process.protocol import ScoreAdapters
from hivetune.records import Progress, silent
from hivetune.routing.birth import ScoredUnit
from hivetune.routing.domains import ExpertRow
from hivetune.run.folder import ADAPTER, SCORES


def scored_rows(
    found: Survey,
    adapters: Mapping[str, Path],
    rows: Sequence[ExpertRow],
    *,
    model: Path | None = None,
    progress: Progress = silent,
) -> list[ScoredUnit]:
    """Nats of each of `rows` with each adapter and with "base", in their order. `model`: another form of the base, such
    as the quantized one that is served. A loss that is not finite is not a number here.

    Raises what a child raises; a scoring that was killed goes on where it was.
    """
    base = model or found.model
    numbers = tuple(sorted(number for row in rows for number in row.numbers))
    about = {
        "model": sha256_file(base / MANIFEST),
        "adapters": {name: sha256_file(folder / ADAPTER) for name, folder in adapters.items()},
        "rows": numbers,
        "computed": (found.config.dtype, found.config.device),
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    folder = found.folder / "scores" / key
    scores = folder / SCORES
    task = ScoreAdapters(
        base, adapters, found.snapshot.folder, scores, numbers, found.config.dtype, found.config.device
    )
    total = len(numbers) * (len(adapters) + 1)
    lines = _lines(scores)
    if len(lines) < total:
        run_task(task, folder, on_beat=count_items(progress, total, len(lines))).check("scoring the adapters")
        lines = _lines(scores)
    return [_unit(row, ("base", *adapters), lines) for row in rows]


def _lines(scores: Path) -> dict[tuple[str, int], tuple[float, int]]:
    if not scores.exists():
        return {}
    return {
        (line["model"], line["row"]): (math.nan if line["nll"] is None else line["nll"], line["tokens"])
        for line in read_journal(scores)
        if line["event"] == "loss"
    }


def _unit(row: ExpertRow, names: Sequence[str], lines: Mapping[tuple[str, int], tuple[float, int]]) -> ScoredUnit:
    """The views of one row of the input count together."""
    nats = {name: math.fsum(lines[name, number][0] for number in row.numbers) for name in names}
    return ScoredUnit(row.group, sum(lines[names[0], number][1] for number in row.numbers), nats)
