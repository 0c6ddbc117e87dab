"""The commands `status` (also `hivetune` alone) and `dashboard`, which shows the same in a browser.

They have their own module because `status` runs often and must not import the settings or the formats of rows.
"""

from typing import Annotated

from typer import Option

from hivetune.cli.output import Table, answer, emit_until_stopped, say, show
from hivetune.dashboard.overview import overview


def status() -> None:
    """Show what runs, what is served, what comes next and what needs your attention."""
    state = overview()
    serves = "no gateway runs" if state.gateway_pid is None else f"served by process {state.gateway_pid}"
    labels = ", ".join(release.label for release in state.champions)
    lines = [f"champions: {f'{labels}; {serves}' if labels else 'none'}"]
    for loop in state.loops:
        doing = "paused" if loop.paused else "not running" if loop.pid is None else f"running in process {loop.pid}"
        lines.append(f"cycle {loop.name}: {doing}{f'; {loop.last}' if loop.last else ''}")
    lines.append(f"interactions in the store: {state.interactions:,}")
    running = Table("running=name step steps loss validation_loss tokens/s=tokens_per_second left_s", state.running)
    working = Table("working=doing run pid begun", state.working)
    recent = Table("run=name state step steps loss validation_loss begun=created", state.recent)
    problems = [(run.name, run.storage_problem) for run in (*state.running, *state.recent) if run.storage_problem]
    answer(
        state.document(),
        running,
        working if state.working or state.running else "nothing is running",
        *lines,
        recent if state.recent else "",
        *(f"{name}: {problem}" for name, problem in problems),
        *(f"needs you: {step.why}: {step.command}" for step in state.needs),
        *(f"next: {step.why}: {step.command}" for step in state.next),
    )


def dashboard_command(
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8643,
    new_token: Annotated[bool, Option("--new-token", help="Make a new token, which signs everybody out.")] = False,
) -> None:
    """Show runs, cycles, releases, rows and this machine in a browser, kept up to date.

    The server listens on this machine only. Each action on a page asks for confirmation. A running gateway shows the
    same pages at /dashboard.
    """
    from hivetune.dashboard.app import run_dashboard
    from hivetune.dashboard.page import dashboard_token

    token = dashboard_token(new=new_token)  # before the page: a new one has to be asked for at once

    def tell(url: str) -> None:
        show(f"open {url}login?token={token}")
        say("the address contains the token of this dashboard; keep it private. Stop the server with Ctrl-C")
        emit_until_stopped({"url": url, "token": token})

    run_dashboard(port, tell)
