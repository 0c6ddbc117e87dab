"""Acts on the run of a cycle: its rows, its training in slices, its evaluation and verdict; the replay.

The replay is the training of a cycle whose model was worse, made again without its new rows. Rows are blamed only where
all else is equal: the champion was trained alike, and the replay is better on the held-out rows that are older than the
cycle.
"""

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, read_json, sha256_file
from hivetune.base.journal import read_journal
from hivetune.base.private import make_folder
from hivetune.base.sealed import write_sealed
from hivetune.base.units import number
from hivetune.config import RunConfig
from hivetune.cycle import ledger
from hivetune.cycle.acts.slices import ActContext, Requests, Slice, SliceEnded, ends_with_window
from hivetune.cycle.decide import OpenedFor
from hivetune.cycle.gate import Comparisons, judge_cycle, replay_gain
from hivetune.cycle.ledger import gate_of
from hivetune.cycle.observe import is_evaluation_of, looks_at, rivals_of, settings_then
from hivetune.cycle.pool import (
    MAX_IN_A_ROW,
    ChoiceSettings,
    begins_from,
    budget_tokens,
    champion_then,
    choice_settings,
    choose_rows,
    cycle_id,
    innocent_rows,
    needs_scores,
    pool_of,
    rows_behind,
    rows_of,
)
from hivetune.data.fates import write_leave_out
from hivetune.data.identity import differing_settings
from hivetune.data.snapshot import PoolRow, open_snapshot
from hivetune.errors import HivetuneError, Stopped, UsageError
from hivetune.judge.artefacts import Artefact
from hivetune.judge.compare import compare_pair, evaluate_run
from hivetune.judge.findings import thresholds_of
from hivetune.judge.gate import read_evaluation, verdict_document
from hivetune.judge.held_out import compared_losses
from hivetune.models.fetch import fetch_model
from hivetune.process.parent import run_task
from hivetune.process.protocol import Generate, Score
from hivetune.process.still import yielding
from hivetune.release.dry_export import dry_export
from hivetune.release.registry import Release, champion_of
from hivetune.run.folder import CONFIG, EVALUATION, RECORD, SCORES, adapter_hash, read_record, read_resolved
from hivetune.train.open import Run, load_run
from hivetune.train.probe import probe_run
from hivetune.train.start import open_run, train_run


def train_slice(context: ActContext) -> str:
    """Train one slice of the cycle's run."""
    return slice_of(context, context.run())


def slice_of(context: ActContext, run: Run) -> str:
    """Train one slice. The worker holds the card's lease as long as it lives; the kernel returns it."""
    slice_ = Slice(context.allowed, True)
    total = len(run.plan.steps)
    probe_run(run, context.progress("measuring this machine"))
    report = context.progress("training")
    slice_.on_step = lambda step: report(step, total)
    started = time.monotonic()
    try:
        document = train_run(run, slice_.terms())
    except Stopped as error:
        if error.signal_number is not None:
            raise
        raise SliceEnded(f"{slice_.why}: {error.message}") from None
    finally:
        hours = (time.monotonic() - started - slice_.still_s) / 3600
        context.details |= {"hours": round(hours, 6), "kwh": round(slice_.energy.kwh, 6)}
        context.details["energy"] = "measured" if slice_.energy.measured else "estimated"
    return f"{document['steps']} steps, loss {number(document['loss_last'])}"


def evaluate_beside(context: ActContext) -> str:
    """Evaluate the run against the base, the champion and the best ever, on the same held-out rows."""
    cycle, run = context.cycle(), context.run()
    report = ends_with_window(context, "scoring and answering")
    evaluate_run(run, report)
    with closing(open_database()) as database:
        rivals = rivals_of(database, context.name)
    for rival, file in ((rivals.champion, ledger.AGAINST_CHAMPION), (rivals.best, ledger.AGAINST_BEST)):
        if rival is None or is_evaluation_of(cycle.folder / file, adapter_hash(run.folder), rival):
            continue
        result = compare_pair(rival.label, str(run.folder), run.config.eval, run=run, progress=report)
        facts = {"adapter_sha256": adapter_hash(run.folder), "rival": rival.label}
        write_sealed(cycle.folder / file, {**result.document, **facts})
    return f"measured against {', '.join(('the base', *rivals.labels))}"


def judge_candidate(context: ActContext) -> str:
    """Judge the evaluations against base, champion and best ever. Another champion needs another verdict."""
    cycle, run = context.cycle(), context.run()
    with closing(open_database()) as database:
        rivals = rivals_of(database, context.name)
        earlier = rows_behind(database, rivals.champion) if rivals.champion is not None else frozenset()
        looks = looks_at(database, context.name, rivals)
    contests = Comparisons(
        base=read_evaluation(run.folder / EVALUATION),
        champion=read_evaluation(cycle.folder / ledger.AGAINST_CHAMPION) if rivals.champion is not None else None,
        best=read_evaluation(cycle.folder / ledger.AGAINST_BEST) if rivals.best is not None else None,
        known=earlier,
        look=1 + looks,
    )
    verdict = judge_cycle(contests, thresholds_of(run.config.gate))
    passed, reasons, decisive = verdict.passed, list(verdict.reasons), verdict.decisive
    if cycle.opened_for == "rebuild" and not passed:
        # What was forgotten must go: a model without it need not be better than one with it, only no failure.
        passed = verdict.parts["base"].verdict == "deploy" and verdict.verdict != "abort"
        reasons, decisive = ["the champion holds forgotten rows", *reasons], decisive + 1
    document = {
        "schema": 1,
        "passed": passed,
        "verdict": verdict.verdict,
        "reasons": reasons,
        "decisive": decisive,
        "rivals": list(rivals.labels),
        "adapter_sha256": adapter_hash(run.folder),
        "look": verdict.look,
        "becomes_best": verdict.becomes_best,
        "fresh_rows": verdict.fresh_rows,
        "kl_to_base": verdict.kl_to_base,
        "parts": {rival: verdict_document(part) for rival, part in verdict.parts.items()},
    }
    write_sealed(cycle.folder / ledger.GATE, document)
    return f"{verdict.verdict}: {'; '.join(reasons[:decisive])}"


def open_cycle_of(context: ActContext, opened_for: OpenedFor = "rows") -> str:
    """Open a cycle by naming the rows to choose from. The same rows, settings and champion are the same cycle."""
    pool = pool_of(context.config)
    request = ledger.loop_folder(context.name) / ledger.NOW
    with closing(open_database()) as database:
        champion = champion_of(database, context.name)
        cycle = ledger.CycleRow(
            id=cycle_id(pool, ledger.suspect_rows(database, context.name), context.config, champion),
            name=context.name,
            opened=context.now,
            opened_for="request" if request.exists() and opened_for == "rows" else opened_for,
            config=context.config.model_dump(mode="json", exclude={"cycle": {"notify"}}),  # it goes into releases
            pool=str(pool.folder),
            champion=None if champion is None else champion.label,
        )
        make_folder(cycle.folder)
        new = ledger.begin_cycle(database, cycle)
    request.unlink(missing_ok=True)
    return f"cycle {cycle.id} is open" if new else f"cycle {cycle.id} was there before"


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
        shutil.rmtree(run.folder)  # or it is the next one to be trained
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
    file = folder.parent / (ledger.LEFT_OUT if folder.name == ledger.RUN else f"{folder.name}-{ledger.LEFT_OUT}")
    write_leave_out(file, left_out)
    if folder.exists() and not (folder / RECORD).exists():
        shutil.rmtree(folder)  # killed before it was a run
    data = config.data.model_copy(update={"leave_out": str(file)})
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
    """Return the adapter that training continues from, or None for the base.

    It is the base too when the champion has another base or another kind of adapter, and after MAX_IN_A_ROW cycles,
    since forgetting adds up.
    """
    if champion is None or begins_from("base", trained_in_a_row(champion.folder)) == "base":
        return None
    theirs = read_resolved(champion.folder)[0].lora
    kind = [(lora.r, lora.alpha, lora.target_modules) for lora in (theirs, config.lora)]
    return champion.folder if _is_of_base(champion, config) and kind[0] == kind[1] else None


def _is_of_base(champion: Release, config: RunConfig) -> bool:
    """Return whether the champion was trained on the base as it is now."""
    return champion.model_sha256 == sha256_file(fetch_model(config.model) / MANIFEST)


def trained_in_a_row(folder: Path) -> int:
    """Return how many trainings up to this adapter's each began from an adapter. MAX_IN_A_ROW if one is missing."""
    for count in range(MAX_IN_A_ROW):
        if not (folder / CONFIG).is_file():
            break
        start = read_resolved(folder)[0].lora.start
        if start is None:
            return count
        folder = Path(start)
    return MAX_IN_A_ROW


def _scores(
    config: RunConfig, cycle: ledger.CycleRow, champion: Release, rows: Sequence[PoolRow], settings: ChoiceSettings
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


ROW_SETTINGS = ("data.path", "data.leave_out")  # which rows, not how they are trained
SAME_ROWS = 0.95  # of the champion's rows that the cycle has too: a few are forgotten or above a share each night


def replay_training(context: ActContext) -> str:
    """Train again without the new rows, compare the result with the candidate, and keep it."""
    cycle = context.cycle()
    with closing(open_database()) as database:
        champion, innocent = champion_then(database, cycle), innocent_rows(database, cycle)
    trained = rows_of(cycle)
    begun = (cycle.folder / ledger.REPLAY / RECORD).exists()
    problem = _replay_problem(cycle, champion, trained, innocent)
    opened, settings = context.observed.open, context.config.cycle
    assert opened is not None
    if not begun and settings.hours is not None and 2 * opened.spent_hours > settings.hours:
        problem = problem or "the budget has no room for a second training, without them"
    shown = {"better": False, "words": problem} if problem else _compared(context, trained & innocent, innocent)
    facts = {"schema": 1, "adapter_sha256": gate_of(cycle).get("adapter_sha256")}
    write_sealed(cycle.folder / ledger.REPLAYED, {**facts, **shown})
    return str(shown["words"])


def _compared(context: ActContext, ids: Set[str], known: Set[str]) -> dict[str, Any]:
    """Train on the rows `ids` as the cycle did, and compare both models on the held-out rows `known`."""
    run = context.run()
    replayed = _replay_run(context, run, ids)
    changed = len(ids ^ {row.id for row in replayed.snapshot.pool()})
    if changed:
        return {"better": False, "words": f"{changed} of its other {len(ids)} rows came or went meanwhile"}
    slice_of(context, replayed)
    sides = [Artefact(side.folder.name, "run", trained=(run.model, side.folder)) for side in (replayed, run)]
    with yielding(Requests()):
        rows = compared_losses(run, sides, ends_with_window(context, "scoring the training without the new rows"))
    if isinstance(rows, str):
        return {"better": False, "words": rows}
    better, text = replay_gain([row for row in rows if row["id"] in known])
    return {"better": better, "words": text}


def _replay_run(context: ActContext, run: Run, ids: Set[str]) -> Run:
    """Return the run on the rows `ids`; train it if there is none."""
    cycle = context.cycle()
    folder = cycle.folder / ledger.REPLAY
    if (folder / RECORD).exists():
        return load_run(folder)
    config = settings_then(cycle)
    others = {row.id for row in pool_of(config).pool()} - ids
    config = config.model_copy(update={"lora": run.config.lora})
    return run_without(context, config, folder, dict.fromkeys(others, "suspect"), ids)


def _replay_problem(cycle: ledger.CycleRow, champion: Release | None, trained: Set[str], innocent: Set[str]) -> str:
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
