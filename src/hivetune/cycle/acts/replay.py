"""The replay: the training of a cycle whose model was worse, made again without its new rows.

Rows are blamed only where all else is equal: the champion was trained alike, and the replay is better on the held-out
rows that are older than the cycle.
"""

import sqlite3
from collections.abc import Set
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, read_json
from hivetune.base.sealed import write_sealed
from hivetune.cycle.acts.context import ActContext, Requests, ends_with_window
from hivetune.cycle.acts.data import run_without
from hivetune.cycle.acts.training import slice_of
from hivetune.cycle.gate import replay_gain
from hivetune.cycle.ledger import REPLAY, REPLAYED, CycleRow
from hivetune.cycle.observe import gate_of, settings_then
from hivetune.cycle.pool import pool_of, rows_behind
from hivetune.data.identity import differing_settings
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import UsageError
from hivetune.judge.artefacts import Artefact
from hivetune.judge.losses import compared_losses
from hivetune.process.still import yielding
from hivetune.release.registry import Release, releases
from hivetune.run.folder import RECORD, read_record
from hivetune.train.open import Run, load_run

ROW_SETTINGS = ("data.path", "data.leave_out")  # which rows, not how they are trained
SAME_ROWS = 0.95  # of the champion's rows that the cycle has too: a few are forgotten or above a share each night


def replay_training(context: ActContext) -> str:
    """Train again without the new rows, compare the result with the candidate, and keep it."""
    cycle = context.cycle()
    with closing(open_database()) as database:
        champion, innocent = _champion_then(database, cycle), innocent_rows(database, cycle)
    trained = rows_of(cycle)
    begun = (cycle.folder / REPLAY / RECORD).exists()
    problem = _replay_problem(cycle, champion, trained, innocent) or ("" if begun else _above_budget(context))
    shown = {"better": False, "words": problem} if problem else _compared(context, trained & innocent, innocent)
    facts = {"schema": 1, "adapter_sha256": gate_of(cycle).get("adapter_sha256")}
    write_sealed(cycle.folder / REPLAYED, {**facts, **shown})
    return str(shown["words"])


def _compared(context: ActContext, ids: Set[str], known: Set[str]) -> dict[str, Any]:
    """Train on the rows `ids` as the cycle did, and compare both models on the held-out rows `known`."""
    run, yields = context.run(), context.config.cycle.yield_to == "serving"
    replayed = _replay_run(context, run, ids)
    changed = len(ids ^ {row.id for row in replayed.snapshot.pool()})
    if changed:
        return {"better": False, "words": f"{changed} of its other {len(ids)} rows came or went meanwhile"}
    slice_of(context, replayed)
    sides = [Artefact(side.folder.name, "run", trained=(run.model, side.folder)) for side in (replayed, run)]
    with yielding(Requests()) if yields else nullcontext():
        rows = compared_losses(run, sides, ends_with_window(context, "scoring the training without the new rows"))
    if isinstance(rows, str):
        return {"better": False, "words": rows}
    better, text = replay_gain([row for row in rows if row["id"] in known])
    return {"better": better, "words": text}


def _replay_run(context: ActContext, run: Run, ids: Set[str]) -> Run:
    """Return the run on the rows `ids`; train it if there is none."""
    cycle = context.cycle()
    folder = cycle.folder / REPLAY
    if (folder / RECORD).exists():
        return load_run(folder)
    config = settings_then(cycle)
    others = {row.id for row in pool_of(config).pool()} - ids
    config = config.model_copy(update={"lora": run.config.lora})
    return run_without(context, config, folder, dict.fromkeys(others, "suspect"), ids)


def _above_budget(context: ActContext) -> str:
    opened, settings = context.observed.open, context.config.cycle
    assert opened is not None
    for spent, budget in ((opened.spent_hours, settings.budget_hours), (opened.spent_kwh, settings.budget_kwh)):
        if budget is not None and 2 * spent > budget:
            return "the budget has no room for a second training, without them"
    return ""


def _replay_problem(cycle: CycleRow, champion: Release | None, trained: Set[str], innocent: Set[str]) -> str:
    """Return another possible cause of the cycle's worse model than its new rows, or "".

    `trained`: rows of the cycle. `innocent`: those that the champion was made with.
    """
    identity = read_record(cycle.run)["identity"]
    if champion is None or champion.model_sha256 != identity["model"]:
        return "the champion is of another base model"
    try:
        theirs = read_json(champion.folder / MANIFEST)["settings"]
    except FileNotFoundError:
        return "the champion's settings are gone"
    differences = differing_settings(theirs, identity["settings"])
    others = [difference for key, difference in differences.items() if key not in ROW_SETTINGS]
    if others:
        return f"the champion was trained otherwise ({'; '.join(others)})"
    if identity["settings"].get("max_steps") is not None:
        return "max_steps is set, so that each row was read less often beside more rows"
    if len(innocent - trained) > (1 - SAME_ROWS) * len(innocent):
        return f"{len(innocent - trained)} of the champion's {len(innocent)} rows were left out"
    return "" if trained - innocent else "it had no new rows"


def innocent_rows(database: sqlite3.Connection, cycle: CycleRow) -> frozenset[str]:
    """Return the ids of the rows behind the champion that the cycle was opened with."""
    champion = _champion_then(database, cycle)
    return frozenset() if champion is None else rows_behind(database, champion)


def _champion_then(database: sqlite3.Connection, cycle: CycleRow) -> Release | None:
    return next((release for release in releases(database, cycle.name) if release.label == cycle.champion), None)


def rows_of(cycle: CycleRow) -> frozenset[str]:
    """Return the ids of the rows that the run trained on or held out, or all rows of its pool where the run is gone."""
    try:
        return frozenset(row.id for row in open_snapshot(Path(read_record(cycle.run)["snapshot"])).pool())
    except (UsageError, KeyError):
        return frozenset(row.id for row in open_snapshot(Path(cycle.pool)).pool())
