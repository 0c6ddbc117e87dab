"""The commands `status` (one screen, also `hivetune` alone) and `dashboard` (the same in a browser)."""

from typing import Annotated

import typer

from hivetune.cli.output import (
    MODE,
    duration,
    emit,
    emit_until_stopped,
    moment,
    number,
    open_in_browser,
    say,
    show,
    table,
)
from hivetune.dashboard.overview import Suggestion, overview
from hivetune.run.status import RunStatus


def status() -> None:
    """Show what runs, what is served, what comes next and what needs your attention."""
    state = overview()
    if state.running:
        columns = ("running", "steps", "loss", "validation", "tokens/s", "left")
        table("", columns, [_running(run) for run in state.running], numeric=columns[1:])
    else:
        show("nothing is running")
    by = "" if state.gateway_pid is None else f" by process {state.gateway_pid}"
    champions = [f"{r.label}, {'' if r.label in state.served else 'not '}served{by}" for r in state.champions]
    show(f"champions: {'; '.join(champions) or 'none'}")
    for loop in state.loops:
        served_by = "paused" if loop.paused else "not running" if loop.pid is None else f"running in process {loop.pid}"
        show(f"cycle {loop.name}: {served_by}{f'; {loop.last}' if loop.last else ''}")
    show(f"interactions in the store: {state.interactions:,}")
    if state.recent:
        columns = ("run", "state", "steps", "loss", "validation", "begun")
        table("", columns, [_recent(run) for run in state.recent], numeric=columns[2:5])
    for run in (*state.running, *state.recent):
        if run.storage_problem:
            show(f"{run.run.name}: {run.storage_problem}")
    _steps("needs you", state.needs)
    _steps("next", state.next)
    emit(state.document())


def _steps(title: str, steps: tuple[Suggestion, ...]) -> None:
    for step in steps:
        show(f"{title}: {step.why}: {step.command}")


def _running(status: RunStatus) -> tuple[object, ...]:
    remaining = "-" if status.left_s is None else duration(status.left_s)
    steps = f"{status.step}/{status.steps}"
    losses = (number(status.loss), number(status.validation_loss))
    return (status.run.name, steps, *losses, number(status.tokens_per_second, 0), remaining)


def _recent(status: RunStatus) -> tuple[object, ...]:
    return (
        status.run.name,
        status.state,
        f"{status.step}/{status.steps}",
        number(status.loss),
        number(status.validation_loss),
        moment(status.created),
    )


def dashboard_command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8643,
    open_it: Annotated[bool, typer.Option("--open", help="Open the dashboard in a browser.")] = False,
    new_token: Annotated[
        bool, typer.Option("--new-token", help="Make a new token, which signs everybody out.")
    ] = False,
) -> None:
    """Show runs, cycles, releases, rows and this machine in a browser, kept up to date.

    The server listens on this machine only. Each action on a page asks for confirmation. A running gateway shows the
    same pages at /dashboard.
    """
    # `status` is called often, and should not wait a second for the pages to be imported.
    from hivetune.dashboard.access import dashboard_token, make_ticket
    from hivetune.dashboard.app import run_dashboard

    token = dashboard_token(new=new_token)

    def tell(url: str) -> None:
        address = f"{url}login?token={token}"
        show(f"open {address}")
        say("the address holds the token of this dashboard; keep it private. Stop the server with Ctrl-C")
        emit_until_stopped({"url": url, "token": token})
        # All users of a machine can read with what words a program was started.
        if open_it and not MODE.json and not open_in_browser(f"{url}login?token={make_ticket()}"):
            say("cannot start a browser here; open the address yourself")

    run_dashboard(port, tell)
