"""`hivetune route TEXT`: which adapter of a family would answer, and why."""

import sys
from contextlib import closing
from typing import Annotated

import typer

from hivetune.base.database import open_database
from hivetune.cli.output import emit, say, show
from hivetune.errors import UsageError
from hivetune.routing.choose import Asking, choose
from hivetune.routing.domains import declared_keys
from hivetune.routing.steps import families
from hivetune.serve.swap.wanted import wanted


def route_request(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The last user turn of a request; '-': standard input.")],
    name: Annotated[
        str | None, typer.Option("--name", help="The shared release; needed where several have experts.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="The agent that the request declares.")] = None,
    category: Annotated[str | None, typer.Option("--category", help="The category that it declares.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="Its system prompt.")] = None,
) -> None:
    """Which adapter answers a request, and why: a declared key first, then the text, else the shared adapter."""
    with closing(open_database()) as database:
        known = families(database)
    shared = name or (next(iter(known)) if len(known) == 1 else None)
    if shared is None or shared not in known:
        there = f"; families: {', '.join(known)}" if known else ""
        what = (
            f"{shared} has no experts"
            if shared
            else "several releases have experts"
            if known
            else "there are no experts"
        )
        raise UsageError(f"{what}{there}", hint="hivetune experts CONFIG --train makes them; --name says whose")
    with closing(open_database()) as database:
        found = wanted(database, [shared])  # as the gateway sees it: who can't be loaded answers nothing
    for problem in found.problems:
        say(problem)
    if shared not in found.experts:
        raise UsageError(f"the router of {shared} can't be read", hint="hivetune experts CONFIG --train makes it anew")
    asked = sys.stdin.read() if text == "-" else text
    question = Asking(shared, declared_keys(agent, category, system, ()), asked)
    choice = choose(found.experts, found.family, question, found.champions)
    show(f"{choice.model}: {choice.reason}")
    emit({"name": choice.model, "by": choice.by, "reason": choice.reason, "problems": list(found.problems)})
