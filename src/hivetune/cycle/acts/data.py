"""Acts on rows: open a cycle, choose its rows, make its run."""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.base.journal import read_journal
from hivetune.base.private import make_folder
from hivetune.config import RunConfig
from hivetune.cycle.acts.context import ActContext, ends_with_window
from hivetune.cycle.decide import OpenedFor
from hivetune.cycle.ledger import (
    LEFT_OUT,
    NOW,
    RUN,
    CycleRow,
    begin_cycle,
    loop_folder,
    suspect_rows,
)
from hivetune.cycle.observe import champion_of, settings_then
from hivetune.cycle.pool import budget_tokens, choice_settings, cycle_id, pool_config, pool_of
from hivetune.cycle.rows import MAX_IN_A_ROW, ChoiceSettings, begins_from, choose_rows, needs_scores
from hivetune.data.leave_out import write_leave_out
from hivetune.data.snapshot import PoolRow, open_snapshot
from hivetune.errors import HivetuneError, UsageError
from hivetune.models.fetch import fetch_model
from hivetune.process.parent import run_task
from hivetune.process.protocol import Generate, Score
from hivetune.release.dry_export import dry_export
from hivetune.release.registry import Release
from hivetune.run.choices import read_resolved
from hivetune.run.folder import CONFIG, RECORD, SCORES
from hivetune.train.open import Run
from hivetune.train.start import open_run


def open_cycle_of(context: ActContext, opened_for: OpenedFor = "rows") -> str:
    """Open a cycle by naming the rows to choose from. The same rows, settings and champion are the same cycle."""
    pool = pool_of(context.config)
    request = loop_folder(context.name) / NOW
    with closing(open_database()) as database:
        champion = champion_of(database, context.name)
        cycle = CycleRow(
            id=cycle_id(pool, suspect_rows(database, context.name), context.config, champion),
            name=context.name,
            opened=context.now,
            opened_for="request" if request.exists() and opened_for == "rows" else opened_for,
            config=context.config.model_dump(mode="json", exclude={"cycle": {"notify"}}),  # it goes into releases
            pool=str(pool.folder),
            champion=None if champion is None else champion.label,
        )
        make_folder(cycle.folder)
        new = begin_cycle(database, cycle)
    request.unlink(missing_ok=True)
    return f"cycle {cycle.id} is open" if new else f"cycle {cycle.id} was there before"


def open_rebuild(context: ActContext) -> str:
    return open_cycle_of(context, "rebuild")


def make_run(context: ActContext) -> str:
    """Choose the rows and make the run with its plan."""
    cycle = context.cycle()
    config = settings_then(cycle)
    present = pool_of(config)
    try:
        pool = open_snapshot(Path(cycle.pool))
    except UsageError:  # deleted meanwhile: the same rows make the same one again
        pool = present
    rows = list(pool.pool())
    champion = context.champion()
    with closing(open_database()) as database:
        settings = choice_settings(database, config, context.name, champion)
    start = _start(config, champion) if cycle.opened_for != "rebuild" else None
    trainable = [row for row in rows if row.id not in settings.suspect]
    settings = replace(settings, budget_tokens=budget_tokens(config, trainable), going_on=start is not None)
    if champion is not None and _is_of_base(champion, config) and needs_scores(rows, settings):
        settings = replace(settings, scores=_scores(config, cycle, champion, rows, settings))
    choice = choose_rows(rows, settings)
    left_out = dict(choice.left_out)
    ids = {row.id for row in rows}
    left_out |= {row.id: "next-cycle" for row in present.pool() if row.id not in ids}
    lora = config.lora.model_copy(update={"start": None if start is None else str(start)})
    run = run_without(context, config.model_copy(update={"lora": lora}), cycle.run, left_out, ids)
    tried = dry_export(run)
    if tried.unwritten:  # said now, not after the night in which it was trained
        raise UsageError(f"the model of this cycle could not be exported: {tried.unwritten}")
    context.details["start"] = "base" if champion is None or start is None else champion.label
    context.details["tokens"] = {"new": choice.new_tokens, "old": choice.old_tokens, "general": choice.general_tokens}
    context.details["rows"] = dict(run.snapshot.manifest["accounting"])
    return f"{len(run.snapshot.rows('train'))} rows to train on, {len(run.plan.steps)} steps"


def run_without(
    context: ActContext, config: RunConfig, folder: Path, left_out: Mapping[str, str], ids: Set[str]
) -> Run:
    """Make the run in `folder` without the rows `left_out`, id -> reason. Raises HivetuneError when others than `ids`
    arrived meanwhile."""
    file = folder.parent / (LEFT_OUT if folder.name == RUN else f"{folder.name}-{LEFT_OUT}")
    write_leave_out(file, left_out)
    if folder.exists() and not (folder / RECORD).exists():
        shutil.rmtree(folder)  # killed before it was a run
    data = pool_config(config).data.model_copy(update={"leave_out": str(file)})
    chosen = config.model_copy(update={"data": data, "output": str(folder)})
    run = open_run(chosen, context.name, ends_with_window(context, "preparing rows"))
    late = {row.id for row in run.snapshot.pool()} - ids
    if late:
        shutil.rmtree(folder)
        raise HivetuneError(
            f"{len(late)} rows arrived while the cycle chose its rows",
            hint="the act is retried; the rows wait for the next cycle",
        )
    return run


def _start(config: RunConfig, champion: Release | None) -> Path | None:
    """Return the adapter that training continues from (`cycle.start_from: last`), or None for the base.

    It is the base too when the champion has another base or another kind of adapter, and after MAX_IN_A_ROW cycles,
    since forgetting adds up.
    """
    if champion is None or begins_from(config.cycle.start_from, trained_in_a_row(champion.folder)) == "base":
        return None
    theirs = read_resolved(champion.folder)[0].lora
    kind = [(lora.r, lora.alpha, lora.rslora, lora.target_modules) for lora in (theirs, config.lora)]
    return champion.folder if _is_of_base(champion, config) and kind[0] == kind[1] else None


def _is_of_base(champion: Release, config: RunConfig) -> bool:
    """Return whether the champion was trained on the base as it is now."""
    return champion.model_sha256 == sha256_file(fetch_model(config.model) / MANIFEST)


def trained_in_a_row(folder: Path) -> int:
    """Return how many trainings in a row, up to this adapter's, started from an adapter. MAX_IN_A_ROW if one of them is
    missing."""
    for count in range(MAX_IN_A_ROW):
        if not (folder / CONFIG).is_file():
            break
        start = read_resolved(folder)[0].lora.start
        if start is None:
            return count
        folder = Path(start)
    return MAX_IN_A_ROW


def _scores(
    config: RunConfig, cycle: CycleRow, champion: Release, rows: Sequence[PoolRow], settings: ChoiceSettings
) -> dict[str, float]:
    """Score each old row by the champion, in nats per token, so that forgotten rows are trained again first."""
    views = {
        number: row.id for row in rows if row.split == "train" and row.id in settings.known for number in row.numbers
    }
    folder = cycle.folder / "scoring"
    task = Score(
        model=fetch_model(config.model),
        adapter=champion.folder,
        snapshot=Path(cycle.pool),
        scores=folder / SCORES,
        rows=tuple(sorted(views)),
        generate=Generate((), 1, 1),
        dtype=config.dtype,
        device=config.device,
    )
    run_task(task, folder).check("scoring the old rows")
    nats: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for line in read_journal(task.scores):
        if line["event"] == "loss" and line["model"] == "tuned" and line["nll"] is not None:
            nats[views[line["row"]]] += line["nll"]
            tokens[views[line["row"]]] += line["tokens"]
    return {identity: nats[identity] / tokens[identity] for identity in tokens if tokens[identity]}
