"""One cycle, straight from its rows to its end: `run_cycle`.

Killed anywhere, the same call continues: each station finds what it left and is done, or begins again. What it left is
of this adapter and this champion, compared by their hashes. Long work ends with the window, and computes only while
nobody else wants the processor.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file, write_json
from hivetune.base.documents import read_document
from hivetune.base.journal import read_journal
from hivetune.config import RunConfig, parse_config
from hivetune.cycle.domains import domain_of
from hivetune.cycle.gate import Comparisons, judge_cycle
from hivetune.cycle.record import (
    AGAINST_CHAMPION,
    GATE,
    LEFT_OUT,
    CycleEnd,
    CycleRow,
    cycles_of,
    end_cycle,
    gate_of,
    measured_document,
    release_of,
)
from hivetune.cycle.rows import (
    affordable_tokens,
    by_source,
    choose_rows,
    ids_of,
    known_rows,
    pool_of,
    rows_behind,
    rows_of,
)
from hivetune.cycle.window import Permission
from hivetune.data.leave_out import write_leave_out
from hivetune.errors import Busy, DoesNotFit, HivetuneError, MachineNotFit, Stopped
from hivetune.judge.evaluate import compare_pair, evaluate_run, verdict_document
from hivetune.models.prepared import folder_for
from hivetune.process.launch import when_idle
from hivetune.records import Progress, silent
from hivetune.release.prune import Unused, delete
from hivetune.release.registry import (
    CROWNED,
    Release,
    champion_of,
    forgotten_rows,
    history,
    promote,
    releases,
    retire,
)
from hivetune.run import checkpoints
from hivetune.run.figures import report
from hivetune.run.folder import EVALUATION, METRICS, RECORD, adapter_hash, read_record
from hivetune.run.status import run_status
from hivetune.serve.register import register_run
from hivetune.serve.route import loaded_labels
from hivetune.train.open import Run, load_run
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms

BY = "cycle"  # who moved an alias, in its history
LOOK_EVERY_S = 5.0  # at the window, which is slower to ask than a lock
MARGIN_S = 30.0  # before the window ends, a training is told to save and end
LOAD_TIMEOUT_S = 120.0  # for a gateway to load a new release

Ended = tuple[CycleEnd, str]


class WindowEnded(HivetuneError):
    """The window or a person ended a piece of work. Nothing failed."""


class OverBudget(HivetuneError):
    """The training took more hours than the budget has."""

    exit_code = DoesNotFit.exit_code


@dataclass
class Work:
    """What the stations of a cycle work with. `allowed` is asked while they work. `station` is entered around each, and
    told in words what came of it."""

    cycle: CycleRow
    config: RunConfig
    allowed: Callable[[], Permission]
    station: Callable[[str], AbstractContextManager[list[str]]]
    progress: Callable[[str], Progress] = lambda label: silent

    @contextmanager
    def long(self, name: str, label: str) -> Iterator[tuple[list[str], Progress]]:
        """Enter a station whose children compute while nobody else does; its progress ends it with the window."""
        shown, looked = self.progress(label), -inf

        def progress(done: int, total: int | None) -> None:
            nonlocal looked
            shown(done, total)
            if time.monotonic() - looked >= LOOK_EVERY_S:
                looked, allowed = time.monotonic(), self.allowed()
                if not allowed.now or (allowed.until is not None and time.time() + LOOK_EVERY_S >= allowed.until):
                    raise WindowEnded(allowed.reason)

        with self.station(name) as words, when_idle():
            yield words, progress


def settings_then(cycle: CycleRow) -> RunConfig:
    """Return the config that a cycle was opened with. A later change counts for the next cycle."""
    return parse_config(cycle.config, f"cycle {cycle.id}")


def run_cycle(work: Work) -> Ended:
    """Bring the cycle to its end, and return how and why it ended; `close_cycle` writes it. Raises WindowEnded,
    Stopped, and what fails on the way."""
    if ended := _over(work.cycle):
        return ended
    run = ensure_run(work)
    ensure_trained(work, run)
    ensure_evaluated(work, run)
    passed, reason = ensure_judged(work, run)
    if not passed:
        return "refused", reason
    release = ensure_registered(work, run)
    if ended := _over(work.cycle):
        return ended
    if work.config.cycle.promote == "ask" or _is_retired(work.cycle.name):
        return "ready", f"{release.label} passed the gate and waits for a person to promote it"
    promote_loaded(work, release)
    return "promoted", f"{release.label} is the champion: {reason}"


def close_cycle(cycle: CycleRow, end: CycleEnd, reason: str, now: float) -> str:
    """Close the cycle and return why it ended. A refusal names its new rows by source, for a person to look at."""
    trained = [] if end in ("failed", "given_up") else rows_of(cycle)
    with closing(open_database()) as database:
        # The champion of the time when the cycle was opened, whatever was promoted since.
        behind = rows_behind(database, next((r for r in releases(database) if r.label == cycle.champion), None))
        new = [row for row in trained if row.id not in behind]
        if end == "refused" and cycle.champion is not None and new:
            reason = f"{reason}; new since {cycle.champion}: {by_source(new)}. Set aside what is wrong among them"
        saved = cycle.run / checkpoints.FOLDER
        if saved.is_dir() and run_status(cycle.run).state == "done":
            delete(database, Unused("checkpoints", saved, 0, "its cycle is closed"))
        if end == "refused" and domain_of(cycle) is not None and retire(database, cycle.name, by=BY, reason=reason):
            reason += f"; {cycle.name} is retired, and {cycle.champion} answers for it"
        end_cycle(database, cycle, end, reason, now, behind | {row.id for row in trained})
    return reason


def _over(cycle: CycleRow) -> Ended | None:
    """Return the end of a cycle that needs no more work: its release was promoted or rolled back before it was closed,
    or its rows or its base model are no longer those that it began with."""
    with closing(open_database()) as database:
        release = release_of(database, cycle)
        if release is not None and release.withdrawn:
            return "rolled_back", release.withdrawn
        moves = history(database, cycle.name)
        if release is not None and any(move.action in CROWNED and move.version == release.version for move in moves):
            return "promoted", f"{release.label} was promoted"
        if not (cycle.run / RECORD).exists():
            return None
        identity = read_record(cycle.run).get("identity", {})
        if forgotten := forgotten_rows(database, identity.get("snapshot", "")):
            return "given_up", f"{forgotten} of its rows were forgotten"
    config = settings_then(cycle)
    manifest = folder_for(config.model, config.template) / MANIFEST
    if manifest.exists() and sha256_file(manifest) != identity.get("model"):
        return "given_up", "the base model was changed after it began"
    return None


def _is_retired(name: str) -> bool:
    """Return whether a person took the champion out of service, so that only a person brings the name back."""
    with closing(open_database()) as database:
        past = [move for move in history(database, name) if move.action in (*CROWNED, "retired")]
    return bool(past) and past[-1].action == "retired" and past[-1].by != BY


def ensure_run(work: Work) -> Run:
    """Return the run of the cycle, made of its chosen rows with its plan. From then on its rows are those."""
    folder = work.cycle.run
    if (folder / RECORD).exists() and Path(read_record(folder).get("snapshot", "")).is_dir():
        return load_run(folder)
    with work.long("rows", "preparing rows") as (words, progress):
        pool, domain = pool_of(work.config), domain_of(work.cycle)
        rows = list(pool.pool())
        mine = rows if domain is None else [row for row in rows if domain.holds(row)]
        with closing(open_database()) as database:
            known = known_rows(database, work.cycle.name, champion_of(database, work.cycle.name))
        left_out = work.cycle.folder / LEFT_OUT
        write_leave_out(left_out, choose_rows(rows, known, affordable_tokens(work.config, mine), domain))
        shutil.rmtree(folder, ignore_errors=True)  # killed before it was a run
        data = work.config.data.model_copy(update={"leave_out": str(left_out)})
        chosen = work.config.model_copy(update={"data": data, "output": str(folder)})
        run = open_run(chosen, work.cycle.name, progress)
        if late := len(ids_of(run.snapshot) - ids_of(pool)):
            shutil.rmtree(folder)
            raise Busy(f"{late} rows arrived while the cycle chose its rows", hint="it chooses again in a minute")
        words.append(f"{len(run.snapshot.rows('train'))} rows to train on, {len(run.plan.steps)} steps")
    return run


def ensure_trained(work: Work, run: Run) -> None:
    """Train the run to its end, in slices that end at a checkpoint before the window does. Raises OverBudget."""
    if run.is_finished:
        return
    with work.station("train") as words:
        hours, began = work.config.cycle.hours, time.time()
        spent_s = trained_seconds(run.folder)
        budget_ends = inf if hours is None else began + 3600 * hours - spent_s
        if budget_ends < began:
            raise OverBudget(f"{spent_s / 3600:.3g} hours of training are above the budget of {hours:g}")
        total, show = len(run.plan.steps), work.progress("training")
        why, looked, stepped, step_s = "", -inf, time.monotonic(), 0.0

        def on_step(step: int) -> None:
            nonlocal stepped, step_s
            step_s, stepped = time.monotonic() - stepped, time.monotonic()
            show(step, total)

        def ends() -> int:
            """Return 1 to end after a checkpoint, 2 to end now."""
            nonlocal why, looked
            if time.monotonic() - looked < LOOK_EVERY_S:
                return 0
            looked, allowed, now = time.monotonic(), work.allowed(), time.time()
            if not allowed.now:
                why = allowed.reason
                return 1 if allowed.again is None else 2  # the window is closed: it was missed, by a sleeping machine
            # The time for the step at hand, and as long again for its checkpoint.
            if allowed.until is not None and now >= allowed.until - max(MARGIN_S, 2 * step_s):
                why = "the window ends"
            elif now >= budget_ends:
                why = "the hours of the budget are used up"
            return 1 if why else 0

        try:
            document = train_run(run, Terms(on_step, ends, words.append))
        except Stopped as error:
            if error.signal_number is not None:
                raise
            raise WindowEnded(f"{why}: {error.message}") from None
        words.append(f"{document['steps']} steps")


def trained_seconds(run: Path) -> float:
    """Return how long the steps of a run took so far, as its journal says."""
    return sum(float(entry.get("seconds", 0.0)) for entry in read_journal(run / METRICS) if entry["event"] == "step")


def ensure_evaluated(work: Work, run: Run) -> None:
    """Evaluate the run against the base and the champion on the same held-out rows."""
    rival, adapter = _rival(work.cycle), adapter_hash(run.folder)
    beside = work.cycle.folder / AGAINST_CHAMPION
    is_measured = measured_document(run.folder / EVALUATION).get("adapter_sha256") == adapter
    is_beside = rival is None or _is_of(measured_document(beside), adapter, rival)
    if is_measured and is_beside:
        return
    with work.long("evaluate", "scoring and answering") as (words, progress):
        if not is_measured:
            evaluate_run(run, progress)
        if rival is not None and not is_beside:
            result = compare_pair(rival.label, str(run.folder), run.config.eval, run=run, progress=progress)
            write_json(beside, {**result.document, "adapter_sha256": adapter, "rival": rival.label})
        words.append(f"measured against the base{'' if rival is None else f' and {rival.label}'}")


def ensure_judged(work: Work, run: Run) -> tuple[bool, str]:
    """Return whether the candidate passed against base and champion, and why. Another champion needs another
    verdict."""
    cycle, rival, adapter = work.cycle, _rival(work.cycle), adapter_hash(run.folder)
    document = gate_of(cycle)
    if not _is_of(document, adapter, rival):
        with work.station("judge") as words:
            document = _judged(cycle, run, rival) | {"adapter_sha256": adapter}
            write_json(cycle.folder / GATE, document)
            words.append(f"{document['verdict']}: {'; '.join(document['reasons'][: document['decisive']])}")
    return bool(document["passed"]), "; ".join(document["reasons"][: document["decisive"]])


def _judged(cycle: CycleRow, run: Run, rival: Release | None) -> dict[str, Any]:
    """Return the document of the verdict."""
    label, domain = None if rival is None else rival.label, domain_of(cycle)
    with closing(open_database()) as database:
        known = rows_behind(database, rival)
        earlier = [other for other in cycles_of(database, cycle.name) if other.closed and other.id != cycle.id]
    contests = Comparisons(
        base=read_document(run.folder / EVALUATION),
        champion=None if rival is None else read_document(cycle.folder / AGAINST_CHAMPION),
        known=known,
        look=1 + sum(gate_of(other).get("rival", "") == label for other in earlier),
        shares=1 if domain is None else domain.shares,
    )
    verdict = judge_cycle(contests, run.config.gate)
    passed, reasons, decisive = verdict.passed, list(verdict.reasons), verdict.decisive
    if cycle.opened_for == "rebuild" and not passed:
        # What was forgotten must go: a model without it need not be better than one with it, only no failure.
        passed = verdict.parts["base"].verdict == "deploy" and verdict.verdict != "abort"
        reasons, decisive = ["the champion holds forgotten rows", *reasons], decisive + 1
    return {
        "schema": 1,
        "passed": passed,
        "verdict": verdict.verdict,
        "reasons": reasons,
        "decisive": decisive,
        "rival": label,
        "look": verdict.look,
        "fresh_rows": verdict.fresh_rows,
        "parts": {name: verdict_document(part) for name, part in verdict.parts.items()},
    }


def ensure_registered(work: Work, run: Run) -> Release:
    """Return the release of the run, exported, proven and registered."""
    with closing(open_database()) as database:
        release = release_of(database, work.cycle)
    if release is None:
        with work.station("register") as words, when_idle():
            domain = domain_of(work.cycle)
            facts = None if domain is None else {"of": domain.of, "by": domain.by, "value": domain.value}
            release, _ = register_run(run.folder, work.cycle.name, facts)
            words += [f"{release.label} is registered", *report(run.folder, run.config.report_to)]
    return release


def promote_loaded(work: Work, release: Release) -> None:
    """Promote the release when a running gateway has loaded it beside the champion. The first release of a name is
    loaded when it is promoted."""
    with work.station("promote") as words:
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        with closing(open_database()) as database:
            is_first = champion_of(database, release.name) is None
        while not is_first and (loaded := loaded_labels(release.name)) is not None and release.label not in loaded:
            if time.monotonic() > deadline:
                raise MachineNotFit(f"the gateway has not loaded {release.label}", hint="its /health says why")
            time.sleep(0.25)
        with closing(open_database()) as database:
            promote(database, release.label, by=BY, reason=f"cycle {work.cycle.id}")
        words.append(f"{release.label} is the champion")


def _rival(cycle: CycleRow) -> Release | None:
    """Return the champion that a cycle's candidate has to beat now: its name's, or for a domain the shared one."""
    domain = domain_of(cycle)
    with closing(open_database()) as database:
        return champion_of(database, cycle.name if domain is None else domain.of)


def _is_of(document: dict[str, object], adapter: str, rival: Release | None) -> bool:
    """Return whether a document is of this adapter, and against this rival."""
    label = None if rival is None else rival.label
    return (document.get("adapter_sha256"), document.get("rival")) == (adapter, label)
