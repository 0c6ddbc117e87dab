"""One cycle, straight from its rows to its end: `run_cycle`.

If it is killed, the same call continues: each station either finds its result or begins again. A result belongs to one
adapter and one champion, compared by their hashes. Long work ends with the window, and computes only while no other
process wants the processor.
"""

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file, write_json
from hivetune.base.documents import read_document
from hivetune.base.journal import Journal
from hivetune.config import RunConfig, parse_config
from hivetune.cycle import record, rows
from hivetune.cycle.gate import Comparisons, judge_cycle
from hivetune.cycle.record import CycleEnd, CycleRow
from hivetune.errors import Busy, HivetuneError, Stopped
from hivetune.judge.evaluate import compare_pair, evaluate_run
from hivetune.models.prepared import folder_for
from hivetune.process.launch import idle_priority
from hivetune.release import registry
from hivetune.release.prune import Unused, delete
from hivetune.release.registry import CROWNED, Release, champion_of
from hivetune.run import checkpoints
from hivetune.run.figures import report
from hivetune.run.folder import EVALUATION, RECORD, adapter_hash, read_record
from hivetune.run.status import run_status
from hivetune.train.open import Run, load_run
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms
from hivetune.walk import register_run

BY = "cycle"  # who moved an alias, in its history
# Before the window ends: work that leaves nothing unfinished ends at once, and a training saves first.
ENDING_S, SAVING_S = 5.0, 30.0
# SQLite's is a lock that another process held too long, or a disk.
FAILURES = (HivetuneError, OSError, sqlite3.OperationalError)  # what is told; any other is a bug

Ended = tuple[CycleEnd, str]


class WindowEnded(HivetuneError):
    """Raised when the time window or a person ends a station's work. It is not a failure."""


@dataclass
class Work:
    """The context of a cycle's stations. `must_end`: called with seconds, returns the reason why work has to end within
    them, or "". `at`: the station that was entered last.
    """

    cycle: CycleRow
    config: RunConfig
    must_end: Callable[[float], str]
    journal: Journal
    say: Callable[[str], None] = lambda words: None
    at: str = ""

    @contextmanager
    def station(self, name: str) -> Iterator[list[str]]:
        """Enter a station, and write its begin and its end to the journal. Yields a list to which the station appends
        its results as text.
        """
        self.at = name
        self.journal.append("begin", cycle=self.cycle.id, station=name)
        self.journal.sync()  # what a power cut ends is named, not guessed
        self.say(name)
        words: list[str] = []
        outcome = "failed"
        try:
            yield words
            outcome = "done"
        except FAILURES as error:
            outcome = {WindowEnded: "paused", Stopped: "stopped"}.get(type(error), "failed")
            words = [first_line(error)]
            raise
        finally:
            with suppress(OSError):  # the station's own error is the one to tell
                told = {"outcome": outcome, "words": "; ".join(words)}
                self.journal.append("end", cycle=self.cycle.id, station=name, **told)
            self.say(f"{name} {outcome}: {'; '.join(words)}")

    def progress(self, done: int, total: int | None) -> None:
        """Raise WindowEnded when work has to end. Stations pass it as the progress callback of their work."""
        if why := self.must_end(ENDING_S):
            raise WindowEnded(why)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its hint."""
    return str(error).partition("\n")[0]


def settings_then(cycle: CycleRow) -> RunConfig:
    """Return the config with which a cycle was opened. Later changes of the config apply to the next cycle."""
    return parse_config(cycle.config, f"cycle {cycle.id}")


def run_cycle(work: Work) -> Ended:
    """Run the cycle to its end; return its outcome and the reason, which `close_cycle` writes. Raises WindowEnded,
    Stopped, and the errors of its stations.
    """
    if ended := _over(work.cycle):
        return ended
    run = ensure_run(work)
    ensure_trained(work, run)
    ensure_evaluated(work, run)
    gate = ensure_judged(work, run)
    reason = "; ".join(gate["reasons"][: gate["decisive"]])
    if not gate["passed"]:
        return "refused", reason
    release = ensure_registered(work, run)
    # A person may have promoted it while it was registered.
    if ended := _over(work.cycle):
        return ended
    if work.config.cycle.promote == "ask":
        return "ready", f"{release.label} passed the gate and waits for a person to promote it"
    with work.station("promote") as words, closing(open_database()) as database:
        # A gateway goes on with the champion before until it has loaded this one.
        registry.promote(database, release.label, by=BY, reason=f"cycle {work.cycle.id}")
        words.append(f"{release.label} is the champion")
    return "promoted", f"{release.label} is the champion: {reason}"


def close_cycle(cycle: CycleRow, end: CycleEnd, reason: str, now: float) -> str:
    """Close the cycle and return the reason, which lists the new rows by source if the gate refused the candidate."""
    trained = [] if end in ("failed", "given_up") else rows.rows_of(cycle)
    with closing(open_database()) as database:
        # The champion of the time when the cycle was opened, whatever was promoted since.
        then = next((release for release in registry.releases(database) if release.label == cycle.champion), None)
        behind = rows.rows_behind(database, then)
        new = [row for row in trained if row.id not in behind]
        if end == "refused" and then is not None and new:
            told = "if some of these are wrong, set them aside"
            reason = f"{reason}; new since {cycle.champion}: {rows.by_source(new)}; {told}"
        # Each is three times the adapter, and a nightly loop makes some every night.
        saved = cycle.run / checkpoints.FOLDER
        if saved.is_dir() and run_status(cycle.run).state == "done":
            delete(database, Unused("checkpoints", saved, 0, "its cycle is closed"))
        is_beaten = end == "refused" and cycle.domain is not None
        if is_beaten and registry.retire(database, cycle.name, by=BY, reason=reason):
            reason += f"; {cycle.name} is retired, and {cycle.champion} answers for it"
        record.end_cycle(database, cycle, end, reason, now, behind | {row.id for row in trained})
    return reason


def _over(cycle: CycleRow) -> Ended | None:
    """Return the outcome of a cycle that needs no more work, else None: its release was already promoted or rolled
    back, or its rows or base model have changed.
    """
    with closing(open_database()) as database:
        if release := record.release_of(database, cycle):
            if release.withdrawn:
                return "rolled_back", release.withdrawn
            if any(move.action in CROWNED for move in release.moves):
                return "promoted", f"{release.label} was promoted"
        if not (cycle.run / RECORD).exists():
            return None
        identity = read_record(cycle.run).get("identity", {})
        if forgotten := registry.forgotten_rows(database, identity.get("snapshot", "")):
            return "given_up", f"{forgotten} of its rows were forgotten"
    # Its losses would be of other tokens than those of its own base, and its adapter is not for this one.
    config = settings_then(cycle)
    manifest = folder_for(config.model, config.template) / MANIFEST
    if manifest.exists() and sha256_file(manifest) != identity.get("model"):
        return "given_up", "the base model was changed after it began"
    return None


def ensure_run(work: Work) -> Run:
    """Return the run of the cycle, created from its chosen rows and its plan. Later calls return the same run."""
    folder, domain = work.cycle.run, work.cycle.domain
    if (folder / RECORD).exists() and Path(read_record(folder).get("snapshot", "")).is_dir():
        return load_run(folder)
    with work.station("rows") as words, idle_priority():
        pool = rows.pool_of(work.config)
        found = list(pool.pool())
        with closing(open_database()) as database:
            known = rows.known_rows(database, work.cycle.name, champion_of(database, work.cycle.name))
        mine = [row for row in found if domain is None or domain.holds(row)]
        budget = rows.affordable_tokens(work.config, mine, rows.planned(work.config, mine)[0])
        left_out = rows.choose_rows(found, known, budget, domain)
        shutil.rmtree(folder, ignore_errors=True)  # killed before it was a run
        chosen = work.config.model_copy(update={"output": str(folder)})
        run = open_run(chosen, work.cycle.name, work.progress, leave_out=left_out)
        # They were read again for the run. What came in between was not chosen: it may be of another domain, or one
        # of a release's own answers.
        if late := len(rows.ids_of(run.snapshot) - rows.ids_of(pool)):
            shutil.rmtree(folder)
            raise Busy(f"{late} rows arrived while the cycle chose its rows", hint="it chooses again in a minute")
        words.append(f"{len(run.snapshot.rows('train'))} rows to train on, {len(run.plan.steps)} steps")
    return run


def ensure_trained(work: Work, run: Run) -> None:
    """Train the run to its end, in parts, each of which ends with a checkpoint before the window ends."""
    if run.is_finished:
        return
    with work.station("train") as words:
        why, stepped, step_s = "", time.monotonic(), 0.0

        def on_step(step: int) -> None:
            nonlocal stepped, step_s
            step_s, stepped = time.monotonic() - stepped, time.monotonic()

        def ends() -> int:
            """Return 1 if the run has to end after its next checkpoint, else 0."""
            nonlocal why
            # The time for the step at hand, and as long again for its checkpoint.
            why = why or work.must_end(max(SAVING_S, 2 * step_s))
            return 1 if why else 0

        try:
            document = train_run(run, Terms(on_step, ends, words.append))
        except Stopped as error:
            if error.signal_number is not None:
                raise
            raise WindowEnded(f"{why}: {error.message}") from None
        words.append(f"{document['steps']} steps")


def ensure_evaluated(work: Work, run: Run) -> None:
    """Evaluate the run against the base and the champion on the same held-out rows."""
    rival, adapter = _rival(work.cycle), adapter_hash(run.folder)
    beside = work.cycle.folder / record.AGAINST_CHAMPION
    is_measured = record.measured_document(run.folder / EVALUATION).get("adapter_sha256") == adapter
    is_beside = rival is None or _is_of(record.measured_document(beside), adapter, rival)
    if is_measured and is_beside:
        return
    with work.station("evaluate") as words, idle_priority():
        if not is_measured:
            evaluate_run(run, work.progress)
        if rival is not None and not is_beside:
            document = compare_pair(rival.label, str(run.folder), run.config.eval, run=run, progress=work.progress)
            write_json(beside, {**document, "adapter_sha256": adapter, "rival": rival.label})
        words.append(f"measured against the base{'' if rival is None else f' and {rival.label}'}")


def ensure_judged(work: Work, run: Run) -> dict[str, Any]:
    """Return the document of the verdict against base and champion. It is made anew if the champion has changed."""
    cycle, rival, adapter = work.cycle, _rival(work.cycle), adapter_hash(run.folder)
    if _is_of(document := record.gate_of(cycle), adapter, rival):
        return document
    with work.station("judge") as words:
        document = _judged(cycle, run, rival) | {"adapter_sha256": adapter}
        write_json(cycle.folder / record.GATE, document)
        words.append(f"{document['verdict']}: {'; '.join(document['reasons'][: document['decisive']])}")
    return document


def _judged(cycle: CycleRow, run: Run, rival: Release | None) -> dict[str, Any]:
    label = None if rival is None else rival.label
    with closing(open_database()) as database:
        known = rows.rows_behind(database, rival)
        earlier = [other for other in record.cycles_of(database, cycle.name) if other.closed and other.id != cycle.id]
        forgotten = 0 if rival is None else registry.forgotten_rows(database, rival.snapshot)
    contests = Comparisons(
        base=read_document(run.folder / EVALUATION),
        champion=None if rival is None else read_document(cycle.folder / record.AGAINST_CHAMPION),
        known=known,
        # Every candidate that was judged against this champion has spent its part of the 5 %.
        look=1 + sum(record.gate_of(other).get("rival", "") == label for other in earlier),
        shares=1 if cycle.domain is None else cycle.domain.shares,
    )
    found = judge_cycle(contests, run.config.gate)
    passed, reasons, decisive = found.passed, list(found.reasons), found.decisive
    if forgotten and not passed:
        # What was forgotten must go: a model without it need not be better than one with it, only no failure.
        passed = found.parts["base"].verdict == "deploy" and found.verdict != "abort"
        reasons, decisive = ["the champion was trained on forgotten rows", *reasons], decisive + 1
    about = {"schema": 1, "passed": passed, "verdict": found.verdict, "reasons": reasons, "decisive": decisive}
    return {**about, "rival": label, "parts": {name: part.verdict for name, part in found.parts.items()}}


def ensure_registered(work: Work, run: Run) -> Release:
    """Return the release of the run after its export, its proof and its registration."""
    with closing(open_database()) as database:
        release = record.release_of(database, work.cycle)
    if release is None:
        # The release's name leads to its domain: the gateway routes by what the proof says.
        with work.station("register") as words, idle_priority():
            domain = work.cycle.domain
            facts = None if domain is None else {"of": domain.of, "by": domain.by, "value": domain.value}
            release, _ = register_run(run.folder, work.cycle.name, facts)
            words += [f"{release.label} is registered", *report(run.folder, run.config.report_to)]
    return release


def _rival(cycle: CycleRow) -> Release | None:
    """Return the champion that a cycle's candidate has to beat now: its name's, or for a domain the shared one; None if
    there is none.
    """
    with closing(open_database()) as database:
        return champion_of(database, cycle.name if cycle.domain is None else cycle.domain.of)


def _is_of(document: dict[str, Any], adapter: str, rival: Release | None) -> bool:
    """Return whether a document was measured with this adapter, against this rival."""
    label = None if rival is None else rival.label
    return (document.get("adapter_sha256"), document.get("rival")) == (adapter, label)
