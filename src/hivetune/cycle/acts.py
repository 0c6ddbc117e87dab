"""What each action does: it calls one station of the walk. Every act may be done again after a kill at any moment."""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.private import make_folder
from hivetune.base.sealed import read_sealed, write_sealed
from hivetune.config import RunConfig
from hivetune.cycle.decide import Action, ActionKind, Allowed, Observed, OpenedFor, ending
from hivetune.cycle.gate import Contests, judge_cycle
from hivetune.cycle.ledger import (
    AGAINST_BEST,
    AGAINST_CHAMPION,
    GATE,
    LEFT_OUT,
    NOW,
    WATCHED,
    CycleRow,
    begin_cycle,
    cycles_of,
    end_cycle,
    loop_folder,
    open_cycle,
)
from hivetune.cycle.night import LOOK_EVERY_S, Slice
from hivetune.cycle.observe import (
    champion_of,
    cycle_id,
    is_evaluation_of,
    pool_config,
    pool_of,
    release_of,
    rivals_of,
    rows_behind,
    settings_then,
    wishes_of,
)
from hivetune.cycle.rows import choose_rows
from hivetune.data.leave_out import write_leave_out
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.records import Progress, silent
from hivetune.release.export import export_run
from hivetune.release.registry import Release, promote, rollback
from hivetune.run import checkpoints
from hivetune.run.adapter import adapter_hash
from hivetune.run.folder import EVALUATION, RECORD
from hivetune.run.record import read_record
from hivetune.serve.gateway.loaded import loaded_labels
from hivetune.walk.before.probe import probe_run
from hivetune.walk.compare.station import compare_pair
from hivetune.walk.evaluate import evaluate_run
from hivetune.walk.open import Run, load_run, open_run
from hivetune.walk.release.register import register_run
from hivetune.walk.train import train_run
from hivetune.walk.verdict import verdict_document

BY = "cycle"  # who moved an alias, in its history
WARM_S = 120.0  # how long a gateway may take to load a new release before that counts as a failure


class SliceEnded(HivetuneError):
    """The window, the budget or a person ended a slice of training; nothing failed."""


@dataclass
class Doing:
    """What an act needs. `allowed` is asked while it goes on; `details` is what the outcome keeps of it."""

    config: RunConfig
    name: str
    observed: Observed
    reason: str
    allowed: Callable[[], Allowed]
    now: float
    progress: Callable[[str], Progress] = lambda label: silent
    details: dict[str, Any] = field(default_factory=dict)

    def cycle(self) -> CycleRow:
        with closing(open_database()) as database:
            found = open_cycle(database, self.name)
        assert found is not None, "decided for an open cycle"
        return found

    def champion(self) -> Release | None:
        with closing(open_database()) as database:
            return champion_of(database, self.name)

    def run(self) -> Run:
        return load_run(self.cycle().run)


def act(action: Action, doing: Doing) -> str:
    """Do it; what came out, in words. Raises SliceEnded, and HivetuneError and OSError for what failed."""
    return ACTS[action.kind](doing)


def _restore(doing: Doing) -> str:
    """The champion's files again from its run; without that the one before it."""
    champion = doing.champion()
    if champion is None:
        raise UsageError(f"{doing.name} has no champion to restore", hint=f"hivetune promote {doing.name}@VERSION")
    try:
        again, _ = register_run(Path(champion.run), champion.name)
        again.check()
        return f"{again.label} was restored from its run"
    except HivetuneError as error:
        with closing(open_database()) as database:
            back, _ = rollback(database, doing.name, by=BY, reason=f"it is damaged: {error.message}")
        return f"{back.label} is the champion again: {champion.label} is damaged"


def _roll_back(doing: Doing) -> str:
    with closing(open_database()) as database:
        back, gone = rollback(database, doing.name, by=BY, reason=doing.reason)
    return f"{back.label} is the champion again; {gone.label} is withdrawn"


def _open(doing: Doing, opened_for: OpenedFor = "rows") -> str:
    """A row of `cycles` that names the rows to choose from. The same rows, settings and champion are the same cycle."""
    pool = pool_of(doing.config)
    asked = loop_folder(doing.name) / NOW
    with closing(open_database()) as database:
        champion = champion_of(database, doing.name)
        cycle = CycleRow(
            id=cycle_id(pool, doing.config, champion),
            name=doing.name,
            opened=doing.now,
            opened_for="request" if asked.exists() and opened_for == "rows" else opened_for,
            config=doing.config.model_dump(mode="json"),
            pool=str(pool.folder),
            champion=None if champion is None else champion.label,
        )
        make_folder(cycle.folder)
        new = begin_cycle(database, cycle)
    asked.unlink(missing_ok=True)
    return f"cycle {cycle.id} is open" if new else f"cycle {cycle.id} was there before"


def _rebuild(doing: Doing) -> str:
    return _open(doing, "rebuild")


def _snapshot(doing: Doing) -> str:
    """The rows are chosen, and the run is made with its plan."""
    cycle = doing.cycle()
    config = settings_then(cycle)
    pool = open_snapshot(Path(cycle.pool))
    with closing(open_database()) as database:
        wishes = wishes_of(database, config, doing.name)
    rows = list(pool.pool())
    choice = choose_rows(rows, wishes)
    left_out = dict(choice.left_out)
    there = {row.id for row in rows}
    present = pool_of(config)
    left_out |= {row.id: "next-cycle" for row in present.pool() if row.id not in there}
    write_leave_out(cycle.folder / LEFT_OUT, left_out)
    data = pool_config(config).data.model_copy(update={"leave_out": str(cycle.folder / LEFT_OUT)})
    if cycle.run.exists() and not (cycle.run / RECORD).exists():
        shutil.rmtree(cycle.run)  # killed before it was a run
    chosen = config.model_copy(update={"data": data, "output": str(cycle.run)})
    run = open_run(chosen, doing.name, _ends_with_window(doing, "preparing rows"))
    late = {row.id for row in run.snapshot.pool()} - there
    if late:
        shutil.rmtree(cycle.run)
        raise HivetuneError(f"{len(late)} rows came while the rows were chosen", hint="they wait for the next cycle")
    doing.details["tokens"] = {"new": choice.new_tokens, "old": choice.old_tokens, "general": choice.general_tokens}
    doing.details["rows"] = dict(run.snapshot.manifest["accounting"])
    return f"{len(run.snapshot.rows('train'))} rows to train on, {len(run.plan.steps)} steps"


def _train(doing: Doing) -> str:
    """One slice. The worker holds the card's lease as long as it lives; the kernel gives it back."""
    run = doing.run()
    settings, opened = doing.config.cycle, doing.observed.open
    assert opened is not None
    left_kwh = None if settings.budget_kwh is None else settings.budget_kwh - opened.spent_kwh
    slice_ = Slice(doing.allowed, settings.yield_to == "serving", left_kwh)
    total = len(run.plan.steps)
    probe_run(run, doing.progress("measuring this machine"))
    report = doing.progress("training")
    slice_.on_step = lambda done: report(done, total)
    started = time.monotonic()
    try:
        document = train_run(run, slice_.terms())
    except HivetuneError as error:
        if slice_.why:
            raise SliceEnded(f"{slice_.why}: {error.message}") from None
        raise
    finally:
        hours = (time.monotonic() - started) / 3600
        doing.details |= {"hours": round(hours, 6), "kwh": round(slice_.energy.kwh, 6)}
        doing.details["energy"] = "measured" if slice_.energy.measured else "estimated"
    return f"{document['steps']} steps, loss {document['loss_last']}"


def _evaluate(doing: Doing) -> str:
    """Against the base on its held-out rows, and against the champion and the best ever on the same."""
    cycle, run = doing.cycle(), doing.run()
    report = _ends_with_window(doing, "scoring and answering")
    evaluate_run(run, report)
    with closing(open_database()) as database:
        rivals = rivals_of(database, doing.name)
    for rival, file in ((rivals.champion, AGAINST_CHAMPION), (rivals.best, AGAINST_BEST)):
        if rival is None or is_evaluation_of(cycle.folder / file, adapter_hash(run.folder), rival):
            continue
        made = compare_pair(rival.label, str(run.folder), run.config.eval, run=run, progress=report)
        about = {"adapter_sha256": adapter_hash(run.folder), "rival": rival.label}
        write_sealed(cycle.folder / file, {**made.document, **about})
    return f"measured against {', '.join(('the base', *rivals.labels))}"


def _gate(doing: Doing) -> str:
    """One verdict on the evaluations against base, champion and best ever; another champion needs another one."""
    cycle, run = doing.cycle(), doing.run()
    with closing(open_database()) as database:
        rivals = rivals_of(database, doing.name)
        known = rows_behind(database, rivals.champion) if rivals.champion is not None else frozenset()
    contests = Contests(
        base=read_sealed(run.folder / EVALUATION),
        champion=read_sealed(cycle.folder / AGAINST_CHAMPION) if rivals.champion is not None else None,
        best=read_sealed(cycle.folder / AGAINST_BEST) if rivals.best is not None else None,
        known=known,
        look=_looks(doing, rivals.champion),
    )
    verdict = judge_cycle(contests, run.config.gate)
    passed, reasons = verdict.passed, list(verdict.reasons)
    if cycle.opened_for == "rebuild" and not passed:
        # What was forgotten must go: a model without it need not be better than one with it, only no failure.
        passed = verdict.parts["base"].verdict == "deploy" and verdict.verdict != "abort"
        reasons = ["the champion holds forgotten rows", *reasons]
    document = {
        "schema": 1,
        "passed": passed,
        "verdict": verdict.verdict,
        "reasons": reasons,
        "rivals": list(rivals.labels),
        "adapter_sha256": adapter_hash(run.folder),
        "look": verdict.look,
        "becomes_best": verdict.becomes_best,
        "fresh_rows": verdict.fresh_rows,
        "parts": {rival: verdict_document(part) for rival, part in verdict.parts.items()},
    }
    write_sealed(cycle.folder / GATE, document)
    return f"{verdict.verdict}: {'; '.join(reasons)}"


def _looks(doing: Doing, champion: Release | None) -> int:
    """The number of this candidate among those that were held against one champion."""
    with closing(open_database()) as database:
        others = [one for one in cycles_of(database, doing.name) if one.closed is not None]
    label = None if champion is None else champion.label
    return 1 + sum(one.champion == label and (one.folder / GATE).exists() for one in others)


def _export(doing: Doing) -> str:
    return str(export_run(doing.run().folder, "gguf-adapter", progress=_ends_with_window(doing, "exporting")).path)


def _register(doing: Doing) -> str:
    release, _ = register_run(doing.run().folder, doing.name)
    return f"{release.label} is registered"


def _warm(doing: Doing) -> str:
    """The gateway has loaded it beside the champion."""
    release = _needed(doing)
    deadline = time.monotonic() + WARM_S
    while True:
        loaded = loaded_labels(doing.name)
        if loaded is None or release.label in loaded:
            return f"{release.label} is loaded" if loaded is not None else "no gateway runs"
        if time.monotonic() > deadline:
            raise MachineNotFit(f"the gateway has not loaded {release.label}", hint="its /health says why")
        time.sleep(0.25)


def _promote(doing: Doing) -> str:
    release = _needed(doing)
    with closing(open_database()) as database:
        promoted = promote(database, release.label, by=BY, reason=f"cycle {doing.cycle().id}")
    return f"{promoted.label} is the champion"


def _watch(doing: Doing) -> str:
    write_sealed(doing.cycle().folder / WATCHED, {"schema": 1, "time": doing.now})
    return "the watch is over"


def _close(doing: Doing) -> str:
    cycle = doing.cycle()
    assert doing.observed.open is not None
    found = ending(doing.observed.open, doing.config.cycle, doing.observed.failed)
    assert found is not None, "decided by what was observed"
    end, reason = found
    trained = [] if end in ("failed", "given_up") else _rows_of(cycle)
    with closing(open_database()) as database:
        end_cycle(database, cycle, end, reason, doing.now, trained)
    shutil.rmtree(cycle.run / checkpoints.FOLDER, ignore_errors=end == "failed")
    doing.details["end"] = end
    return f"cycle {cycle.id} {end.replace('_', ' ')}: {reason}"


def _rows_of(cycle: CycleRow) -> list[str]:
    """Ids of the rows that its run trained on or held out; of all that it chose from where the run is gone."""
    try:
        return [row.id for row in open_snapshot(Path(read_record(cycle.run)["snapshot"])).pool()]
    except (UsageError, KeyError):
        return [row.id for row in open_snapshot(Path(cycle.pool)).pool()]


def _needed(doing: Doing) -> Release:
    with closing(open_database()) as database:
        release = release_of(database, doing.cycle())
    if release is None:
        raise HivetuneError(f"no release was registered from cycle {doing.cycle().id}", hint="it is registered again")
    return release


def _ends_with_window(doing: Doing, label: str) -> Progress:
    """Tells how far it is, and ends the work when it is not allowed any more."""
    report = doing.progress(label)
    looked = float("-inf")

    def progress(done: int, total: int | None) -> None:
        nonlocal looked
        report(done, total)
        if time.monotonic() - looked < LOOK_EVERY_S:
            return
        looked = time.monotonic()
        allowed = doing.allowed()
        if not allowed.now or (allowed.until is not None and time.time() >= allowed.until):
            raise SliceEnded(f"the window ended first: {allowed.reason}")

    return progress


ACTS: Mapping[ActionKind, Callable[[Doing], str]] = {
    "restore": _restore,
    "roll_back": _roll_back,
    "open": _open,
    "rebuild": _rebuild,
    "snapshot": _snapshot,
    "train": _train,
    "evaluate": _evaluate,
    "gate": _gate,
    "export": _export,
    "register": _register,
    "warm": _warm,
    "promote": _promote,
    "watch": _watch,
    "close": _close,
}
