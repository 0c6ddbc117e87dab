"""`hivetune status`, also `hivetune` alone: one screen of what runs, what is served, what comes next."""

import time

from hivetune.cli.output import duration, emit, number, show, table
from hivetune.dashboard.overview import Suggestion, overview
from hivetune.run.status import RunStatus


def status() -> None:
    """What runs, what is served, what comes next, and what needs a person."""
    found = overview()
    if found.running:
        columns = ("running", "steps", "loss", "validation", "tokens/s", "left")
        table("", columns, [_running(each) for each in found.running], numeric=columns[1:])
    else:
        show("nothing is running")
    served = ", ".join(release.label for release in found.champions) or "none"
    if found.champions:
        how = f"served by process {found.gateway_pid}" if found.gateway_pid is not None else "not served"
        served = f"{served}, {how}"
    show(f"champions: {served}")
    for loop in found.loops:
        how = "paused" if loop.paused else "does not run" if loop.pid is None else f"runs in process {loop.pid}"
        show(f"cycle {loop.name}: {how}{f'; {loop.last}' if loop.last else ''}")
    show(f"interactions in the store: {found.interactions:,}")
    if found.recent:
        columns = ("run", "state", "steps", "loss", "validation", "begun")
        table("", columns, [_recent(each) for each in found.recent], numeric=columns[2:5])
    for each in (*found.running, *found.recent):
        if each.storage_problem:
            show(f"{each.run.name}: {each.storage_problem}")
    _steps("needs you", found.needs)
    _steps("next", found.next)
    emit(found.document())


def _steps(title: str, steps: tuple[Suggestion, ...]) -> None:
    for step in steps:
        show(f"{title}: {step.why}: {step.command}")


def _running(status: RunStatus) -> tuple[object, ...]:
    left = "-" if status.left_s is None else duration(status.left_s)
    steps = f"{status.step}/{status.steps}"
    losses = (number(status.loss), number(status.validation_loss))
    return (status.run.name, steps, *losses, number(status.tokens_per_second, 0), left)


def _recent(status: RunStatus) -> tuple[object, ...]:
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.created))
    steps = f"{status.step}/{status.steps}"
    return (status.run.name, status.state, steps, number(status.loss), number(status.validation_loss), begun)
