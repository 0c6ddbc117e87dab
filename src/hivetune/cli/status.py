"""The commands `status` (one screen, also `hivetune` alone) and `dashboard` (the same in a browser)."""

from typing import Annotated

from typer import Option

from hivetune.cli.output import MODE, Table, answer, emit_until_stopped, open_in_browser, say, show
from hivetune.dashboard.overview import overview


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
    running = [(r.run.name, f"{r.step}/{r.steps}", r.loss, r.validation_loss, r.tokens_per_second, r.left_s)
               for r in state.running]  # fmt: skip
    recent = [(r.run.name, r.state, f"{r.step}/{r.steps}", r.loss, r.validation_loss, r.created) for r in state.recent]
    problems = [(run.run.name, run.storage_problem) for run in (*state.running, *state.recent) if run.storage_problem]
    columns = "running, steps, loss|3, validation|3, tokens/s|0, left|duration"
    answer(
        state.document(),
        Table(columns, running) if running else "nothing is running",
        *lines,
        Table("run, state, steps, loss|3, validation|3, begun|time", recent) if recent else "",
        *(f"{name}: {problem}" for name, problem in problems),
        *(f"needs you: {step.why}: {step.command}" for step in state.needs),
        *(f"next: {step.why}: {step.command}" for step in state.next),
    )


def dashboard_command(
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8643,
    open_it: Annotated[bool, Option("--open", help="Open the dashboard in a browser.")] = False,
    new_token: Annotated[bool, Option("--new-token", help="Make a new token, which signs everybody out.")] = False,
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
        show(f"open {url}login?token={token}")
        say("the address holds the token of this dashboard; keep it private. Stop the server with Ctrl-C")
        emit_until_stopped({"url": url, "token": token})
        # All users of a machine can read with what words a program was started: a ticket is good for one sign-in.
        if open_it and not MODE.json and not open_in_browser(f"{url}login?token={make_ticket()}"):
            say("cannot start a browser here; open the address yourself")

    run_dashboard(port, tell)
