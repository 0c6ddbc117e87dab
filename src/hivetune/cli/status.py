"""The commands `status` (one screen, also `hivetune` alone) and `dashboard` (the same in a browser)."""

from typing import Annotated

import typer

from hivetune.cli.output import (
    MODE,
    Columns,
    Table,
    answer,
    duration,
    emit_until_stopped,
    moment,
    number,
    open_in_browser,
    say,
    show,
)
from hivetune.dashboard.overview import overview

RUNNING: Columns = {
    "running": lambda run: run.run.name,
    "steps": lambda run: f"{run.step}/{run.steps}",
    "loss": lambda run: number(run.loss),
    "validation": lambda run: number(run.validation_loss),
    "tokens/s": lambda run: number(run.tokens_per_second, 0),
    "left": lambda run: "-" if run.left_s is None else duration(run.left_s),
}
RECENT: Columns = {
    "run": lambda run: run.run.name,
    "state": "state",
    **{title: RUNNING[title] for title in ("steps", "loss", "validation")},
    "begun": lambda run: moment(run.created),
}


def status() -> None:
    """Show what runs, what is served, what comes next and what needs your attention."""
    state = overview()
    by = "" if state.gateway_pid is None else f" by process {state.gateway_pid}"
    champions = [f"{r.label}, {'' if r.label in state.served else 'not '}served{by}" for r in state.champions]
    lines = [f"champions: {'; '.join(champions) or 'none'}"]
    for loop in state.loops:
        served_by = "paused" if loop.paused else "not running" if loop.pid is None else f"running in process {loop.pid}"
        lines.append(f"cycle {loop.name}: {served_by}{f'; {loop.last}' if loop.last else ''}")
    lines.append(f"interactions in the store: {state.interactions:,}")
    runs = (*state.running, *state.recent)
    problems = [f"{run.run.name}: {run.storage_problem}" for run in runs if run.storage_problem]
    steps = [("needs you", step) for step in state.needs] + [("next", step) for step in state.next]
    answer(
        state.document(),
        Table(RUNNING, state.running) if state.running else "nothing is running",
        *lines,
        *([Table(RECENT, state.recent)] if state.recent else []),
        *problems,
        *(f"{title}: {step.why}: {step.command}" for title, step in steps),
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
