"""Isolation: find the rows of a step that kill their worker, or whose loss is not finite, when each is computed alone.

A child process computes the rows of the step one by one. The first row that it does not survive is the suspect, so one
bad row costs two or three children, whatever the batch size. The suspect is then computed in another way (longer by
padding, with another matrix library). If it fails again, the row is at fault; if not, a kernel is, and the supervisor
tries its next change with all rows.
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

# Another matrix library and other kernels, wherever the run computes. Variables of absent libraries do nothing.
OTHER_RUNGS = ("blas", "plain")


@dataclass(frozen=True)
class Ending:
    """The result of a child of an isolation. `finite`: for each item that it finished, whether the loss was finite.
    `words`: how it ended, "" if it finished all.

    `started`: it began the first item.
    """

    finite: tuple[bool, ...]
    words: str = ""
    started: bool = True


@dataclass(frozen=True)
class Findings:
    """The result of an isolation. `rows`: row at fault -> reason. `children`: number of started processes."""

    words: str
    rows: Mapping[int, str] = field(default_factory=dict)
    children: int = 0


Replayer = Callable[[Sequence[Item], bool], Ending]
"""Runs one child on some items; True: in the other way, with OTHER_RUNGS in effect."""


class _NotTheRows(Exception):
    """Raised when a failure cannot be attributed to a row."""


def isolate(rows: Sequence[int], replay: Replayer, *, most: int, control: int | None = None) -> Findings:
    """Return which of `rows` (those of one step) kill their process or are not finite, when computed in two ways.

    `replay` runs one child. `control` is a row of another step, which each child computes first. If even that one
    fails, or more than `most` rows do, no row is at fault. One bad row takes at most 3 children, each further one 2.
    """
    children = 0
    controls = [] if control is None else [Item((control,))]

    def failing(items: Sequence[Item], *, other: bool) -> dict[int, str]:
        """Return the rows that fail alone, and how. A child that dies is followed by one for the items after it."""
        nonlocal children
        failed: dict[int, str] = {}
        pending = list(items)
        while pending:
            children += 1
            ending = replay([*controls, *pending], other)
            if not ending.started or not all(ending.finite[: len(controls)]) or len(ending.finite) < len(controls):
                why = ending.words or "it is not finite"
                raise _NotTheRows(f"the replay fails before the first of the step's rows: {why}")
            finite = ending.finite[len(controls) :]
            for item, is_finite in zip(pending, finite, strict=False):
                if not is_finite:
                    failed[item.rows[0]] = "the loss or gradient is not finite"
            tested = len(finite)
            if ending.words and tested < len(pending):
                failed[pending[tested].rows[0]] = ending.words
                tested += 1
            if len(failed) > most:
                first = next(iter(failed.values()))
                raise _NotTheRows(f"more than {most} rows fail, so it is the machine and not the rows: {first}")
            pending = pending[tested:]
        return failed

    try:
        suspects = failing([Item((row,)) for row in rows], other=False)
        confirmed = failing([Item((row,), padded=True) for row in suspects], other=True)
    except _NotTheRows as error:
        return Findings(str(error), children=children)
    bad = {row: how for row, how in suspects.items() if row in confirmed}
    cured = ", ".join(str(row) for row in suspects if row not in confirmed)
    words = []
    if bad:
        named = ", ".join(map(str, bad))
        words.append(f"bad row {named}: it fails alone, and again with other padding and another matrix library")
    if cured:
        words.append(f"bad kernel: row {cured} fails as it is, and not when computed another way")
    return Findings("; ".join(words) or "each row of the step is fine alone", bad, children)


def make_replayer(
    run: Path,
    model: Path,
    snapshot: Path,
    *,
    rungs: Sequence[str],
    module: str | None,
    limits: Callable[[], Limits],
) -> Replayer:
    """Return a `replay` that starts children with the same recovery changes (`rungs`) as the worker that died."""
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
