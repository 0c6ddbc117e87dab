"""Isolation: which row of a batch kills the worker, and is it the row or the arithmetic? Throw-away children answer.

A child replays the rows of the batch one by one. The first that it does not survive is the suspect, so one bad row
costs two or three children whatever the batch size. What died is then replayed in another way (longer by padding, other
matrix library, other order). If it dies again it is the row, if not it is a kernel. Each child begins with a row that
was trained before: if even that one dies, it is the machine.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.journal import read_journal
from hivetune.process.limits import FixedLimits, Limits
from hivetune.process.parent import run_task
from hivetune.process.protocol import Item, Outcome, Replay
from hivetune.run.folder import ISOLATION, ITEMS
from hivetune.train.plan.steps import Amendment, append_amendment
from hivetune.train.supervise.changes import worker_effects
from hivetune.train.supervise.ladder import Culprit

# Another matrix library or instruction set, wherever the run computes. Variables of absent libraries do nothing.
OTHER_RUNGS = ("blas", "isa")
# Without a control row: after so many failures and no row that is fine, it is not the rows.
NOTHING_FINE = 3


@dataclass(frozen=True)
class Attempt:
    """What one child is to replay. `other`: in the other way, with OTHER_RUNGS in effect."""

    items: tuple[Item, ...]
    other: bool = False


@dataclass(frozen=True)
class Ending:
    """How far a child came. `finite`: of each item that it finished. `words`: how it ended, "" when it finished all.

    `started`: it got as far as the first item.
    """

    finite: tuple[bool, ...]
    words: str = ""
    started: bool = True


@dataclass(frozen=True)
class BadRow:
    """A row to quarantine."""

    row: int
    reason: str


@dataclass(frozen=True)
class Findings:
    """What an isolation found. `rows` are to be quarantined. `children`: how many were started."""

    culprit: Culprit
    words: str
    rows: tuple[BadRow, ...] = ()
    children: int = 0


class _Machine(Exception):
    """Raised where even a row that was trained before can't be replayed."""


def isolate(rows: Sequence[int], replay: Callable[[Attempt], Ending], *, control: int | None = None) -> Findings:
    """Replay `rows` (a step's, in order) until it is known which of them kill or give NaN, and why.

    `replay` runs one child. `control` is a row that was trained without trouble. At most 3 children for one bad row and
    2 more for each further one, 3 when no row is bad alone, and never more than log2(rows) + 2 for one.
    """
    search = _Search(replay, control)
    try:
        suspects = search.scan([Item((row,)) for row in rows], other=False)
        if suspects:
            return search.judge(suspects)
        return search.together(tuple(rows))
    except _Machine as machine:
        return Findings("machine", str(machine), (), search.children)


@dataclass
class _Search:
    """The state of one isolation."""

    replay: Callable[[Attempt], Ending]
    control: int | None
    children: int = 0

    def scan(self, items: Sequence[Item], *, other: bool) -> dict[Item, str]:
        """Return the items that die or are not finite, each alone, with how.

        A child that dies is followed by one that begins after the item it died of.
        """
        found: dict[Item, str] = {}
        pending = list(items)
        while pending:
            ending = self._run(pending, other=other)
            for item, finite in zip(pending, ending.finite, strict=False):
                if not finite:
                    found[item] = "the loss or gradient is not finite"
            done = len(ending.finite)
            if ending.words and done < len(pending):
                found[pending[done]] = ending.words
                done += 1
            pending = pending[done:]
            tested = len(items) - len(pending)
            if not other and self.control is None and tested == len(found) >= NOTHING_FINE:
                first = next(iter(found.values()))
                raise _Machine(f"each of {tested} rows fails alone, so it is not the rows: {first}")
        return found

    def judge(self, suspects: Mapping[Item, str]) -> Findings:
        """Decide row or kernel, for items that failed alone."""
        again = self.scan([Item(item.rows, padded=True) for item in suspects], other=True)
        failed_again = {item.rows for item in again}
        bad = tuple(BadRow(item.rows[0], how) for item, how in suspects.items() if item.rows in failed_again)
        cured = [item.rows[0] for item in suspects if item.rows not in failed_again]
        words = []
        if bad:
            names = ", ".join(str(each.row) for each in bad)
            words.append(f"bad row {names}: it fails alone, and again with other padding and another matrix library")
        if cured:
            words.append(
                f"bad kernel: row {', '.join(map(str, cured))} fails as it is, and not when computed another way"
            )
        return Findings("row" if bad else "kernel", "; ".join(words), bad, self.children)

    def together(self, rows: tuple[int, ...]) -> Findings:
        """Replay the whole batch, whose rows are fine alone; then in another order, with other padding and library."""
        first = self._run([Item(rows)], other=False)
        if not first.words and first.finite == (True,):
            return Findings("chance", "the same rows were computed again without a fault", (), self.children)
        second = self._run([Item(rows[::-1], padded=True)], other=True)
        if not second.words and second.finite == (True,):
            words = (
                "bad kernel: the batch fails as it is, and not in another order with other padding and another library"
            )
        else:
            words = "the rows fail together and each alone is fine: it is the size of the batch, not its content"
        return Findings("kernel", words, (), self.children)

    def _run(self, items: Sequence[Item], *, other: bool) -> Ending:
        """Run one child. The control row goes first and is taken out of the ending."""
        controls = () if self.control is None else (Item((self.control,)),)
        self.children += 1
        ending = self.replay(Attempt((*controls, *items), other))
        if not ending.started:
            raise _Machine(f"the replay could not begin: {ending.words}")
        if controls:
            if not ending.finite:
                raise _Machine(f"a row that was trained before fails now: {ending.words}")
            if not ending.finite[0]:
                raise _Machine("a row that was trained before is not finite now")
        return Ending(ending.finite[len(controls) :], ending.words)


def replay_in_children(
    run: Path,
    model: Path,
    snapshot: Path,
    *,
    rungs: Sequence[str] = (),
    module: str | None = None,
    limits: Callable[[], Limits] = FixedLimits,
) -> Callable[[Attempt], Ending]:
    """Return the `replay` that starts real children, with `rungs` in effect as in the worker that died."""
    folder = run / ISOLATION

    def replay(attempt: Attempt) -> Ending:
        shutil.rmtree(folder, ignore_errors=True)
        environment, choices = worker_effects(run, (*rungs, *OTHER_RUNGS) if attempt.other else rungs)
        task = Replay(run, model, snapshot, folder / ITEMS, attempt.items, choices)
        outcome = run_task(task, folder, module=module, limits=limits(), environment=environment)
        ending = ending_of(outcome, folder)
        shutil.rmtree(folder, ignore_errors=True)
        return ending

    return replay


def ending_of(outcome: Outcome, folder: Path) -> Ending:
    """Return the ending by what the child wrote before it."""
    events = list(read_journal(folder / ITEMS))
    finite = tuple(event["finite"] for event in events if event["event"] == "item")
    if outcome.status == "done":
        return Ending(finite)
    words = f"{outcome.error.type}: {outcome.error.message}" if outcome.error else outcome.ending()
    return Ending(finite, words, started=bool(events))


def within(findings: Findings, taken: int, most: int) -> Findings:
    """Return the findings, unless they bring the quarantined rows, `taken` so far, above `most`: then it is no row."""
    if taken + len(findings.rows) <= most:
        return findings
    count = taken + len(findings.rows)
    words = f"{count} rows have failed so far, more than the {most} that are tolerated: it is the machine"
    return Findings("machine", words, (), findings.children)


def amend_plan(run: Path, step: int, findings: Findings, source: Callable[[int], str]) -> list[dict[str, Any]]:
    """Amend the plan from `step` on, one amendment a row, on disk when this returns. Return entries for the report."""
    entries = []
    for bad in findings.rows:
        where = source(bad.row)
        append_amendment(run, Amendment(step, (bad.row,), f"{where}: {bad.reason}"))
        entries.append({"row": bad.row, "source": where, "from_step": step, "reason": bad.reason})
    return entries
