"""Isolation: which row of a batch kills the worker, and is it the row or the arithmetic? Throw-away children answer.

A child replays the rows of the batch one by one. The first that it does not survive is the suspect, so one bad row
costs two or three children whatever the batch size. What died is then replayed in another way (longer by padding, other
matrix library, other order). If it dies again it is the row, if not it is a kernel. Each child begins with a row that
was trained before: if even that one dies, it is the machine.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hivetune.base.journal import read_journal
from hivetune.process.parent import Limits, run_task
from hivetune.process.protocol import Item, Replay
from hivetune.run.folder import ISOLATION, ITEMS
from hivetune.train.supervise.attempt import worker_effects
from hivetune.train.supervise.ladder import Culprit

# Another matrix library and other kernels, wherever the run computes. Variables of absent libraries do nothing.
OTHER_RUNGS = ("blas", "plain")
# Without a control row: after so many failures and no row that is fine, it is not the rows.
NOTHING_FINE = 3


@dataclass(frozen=True)
class Ending:
    """The progress of a child. `finite`: of each item that it finished. `words`: how it ended, "" when it finished all.

    `started`: it got as far as the first item.
    """

    finite: tuple[bool, ...]
    words: str = ""
    started: bool = True


@dataclass(frozen=True)
class Findings:
    """The result of an isolation. `rows`: those to quarantine, with the reason. `children`: how many were started."""

    culprit: Culprit
    words: str
    rows: Mapping[int, str] = field(default_factory=dict)
    children: int = 0


Replayer = Callable[[Sequence[Item], bool], Ending]
"""Runs one child on some items; True: in the other way, with OTHER_RUNGS in effect."""


class _Machine(Exception):
    """Raised if even a row that was trained before can't be replayed."""


def isolate(rows: Sequence[int], replay: Replayer, *, control: int | None = None) -> Findings:
    """Replay `rows` (a step's, in order) until it is known which of them kill or give NaN, and why.

    `replay` runs one child. `control` is a row that was trained without trouble. At most 3 children for one bad row and
    2 more for each further one, 3 when no row is bad alone, and never more than log2(rows) + 2 for one.
    """
    children = 0

    def run(items: Sequence[Item], *, other: bool) -> Ending:
        """Run one child. The control row goes first and is taken out of the ending."""
        nonlocal children
        children += 1
        controls = [] if control is None else [Item((control,))]
        ending = replay([*controls, *items], other)
        if not ending.started:
            raise _Machine(f"the replay could not begin: {ending.words}")
        if controls and not ending.finite:
            raise _Machine(f"a row that was trained before fails now: {ending.words}")
        if controls and not ending.finite[0]:
            raise _Machine("a row that was trained before is not finite now")
        return Ending(ending.finite[len(controls) :], ending.words)

    def scan(items: Sequence[Item], *, other: bool) -> dict[int, str]:
        """Return the rows that alone kill their process or are not finite, with the kind of failure.

        A child that dies is followed by one that begins after the item it died of.
        """
        failed: dict[int, str] = {}
        pending = list(items)
        while pending:
            ending = run(pending, other=other)
            for item, finite in zip(pending, ending.finite, strict=False):
                if not finite:
                    failed[item.rows[0]] = "the loss or gradient is not finite"
            num_finite = len(ending.finite)
            if ending.words and num_finite < len(pending):
                failed[pending[num_finite].rows[0]] = ending.words
                num_finite += 1
            pending = pending[num_finite:]
            tested = len(items) - len(pending)
            if not other and control is None and tested == len(failed) >= NOTHING_FINE:
                first = next(iter(failed.values()))
                raise _Machine(f"each of {tested} rows fails alone, so it is not the rows: {first}")
        return failed

    try:
        suspects = scan([Item((row,)) for row in rows], other=False)
        if suspects:
            confirmed = scan([Item((row,), padded=True) for row in suspects], other=True)
            bad = {row: how for row, how in suspects.items() if row in confirmed}
            cured = ", ".join(str(row) for row in suspects if row not in confirmed)
            causes = []
            if bad:
                named = ", ".join(map(str, bad))
                causes.append(
                    f"bad row {named}: it fails alone, and again with other padding and another matrix library"
                )
            if cured:
                causes.append(f"bad kernel: row {cured} fails as it is, and not when computed another way")
            return Findings("row" if bad else "kernel", "; ".join(causes), bad, children)
        # Each row is fine alone: the whole batch, then in another order, with other padding and library.
        whole = Ending((True,))
        if run([Item(tuple(rows))], other=False) == whole:
            return Findings("chance", "the same rows were computed again without a fault", children=children)
        if run([Item(tuple(rows)[::-1], padded=True)], other=True) == whole:
            word = (
                "bad kernel: the batch fails as it is, and not in another order with other padding and another library"
            )
        else:
            word = "the rows fail together and each alone is fine: it is the size of the batch, not its content"
        return Findings("kernel", word, children=children)
    except _Machine as machine:
        return Findings("machine", str(machine), children=children)


def replay_in_children(
    run: Path,
    model: Path,
    snapshot: Path,
    *,
    rungs: Sequence[str] = (),
    module: str | None = None,
    limits: Callable[[], Limits] = Limits,
) -> Replayer:
    """Return the `replay` that starts real children, with `rungs` in effect as in the worker that died."""
    folder = run / ISOLATION

    def replay(items: Sequence[Item], other: bool) -> Ending:
        shutil.rmtree(folder, ignore_errors=True)
        environment, choices = worker_effects(run, (*rungs, *OTHER_RUNGS) if other else rungs)
        task = Replay(run, model, snapshot, folder / ITEMS, tuple(items), choices)
        outcome = run_task(task, folder, module=module, limits=limits(), environment=environment)
        events = list(read_journal(folder / ITEMS))
        shutil.rmtree(folder, ignore_errors=True)
        finite = tuple(event["finite"] for event in events if event["event"] == "item")
        if outcome.status == "done":
            return Ending(finite)
        text = f"{outcome.error.type}: {outcome.error.message}" if outcome.error else outcome.ending()
        return Ending(finite, text, started=bool(events))

    return replay


def within(findings: Findings, quarantined: int, most: int) -> Findings:
    """Return the findings, unless they would bring `quarantined` above `most`: then no row is the cause."""
    count = quarantined + len(findings.rows)
    if count <= most:
        return findings
    reason = f"{count} rows have failed so far, more than the {most} that are tolerated: it is the machine"
    return Findings("machine", reason, children=findings.children)
