"""`hivetune rm` and `hivetune prune`: delete runs, and what nothing needs any more."""

import sys
from contextlib import closing
from typing import Annotated

import typer

from hivetune.base.database import open_database
from hivetune.base.disk import size_of
from hivetune.cli.output import MODE, emit, say, show, size, table
from hivetune.errors import UsageError
from hivetune.release.prune import delete, find_unused, remove_run
from hivetune.run.find import find_run

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def rm(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs: names, folders or 'last'.")],
    yes: YesOption = False,
) -> None:
    """Delete runs with their checkpoints and adapters. Releases that were registered from them stay whole."""
    folders = list(dict.fromkeys(find_run(name) for name in runs))
    for folder in folders:
        show(f"{folder}: {size(size_of(folder))}")
    _ask(f"delete {'this run' if len(folders) == 1 else f'these {len(folders)} runs'}", yes=yes)
    freed = 0
    with closing(open_database()) as database:
        for folder in folders:
            freed += remove_run(database, folder)
    show(f"{size(freed)} freed")
    emit({"deleted": [str(folder) for folder in folders], "size_bytes": freed})


def prune(yes: YesOption = False) -> None:
    """What can go without losing a run, a release or anything that can't be made again, and how much it frees."""
    with closing(open_database()) as database:
        found = find_unused(database)
        total = sum(each.size_bytes for each in found)
        rows = [(each.what, each.path, size(each.size_bytes), each.why) for each in found]
        if found:
            table("", ("what", "where", "size", "why"), rows, numeric=("size",))
        show(f"{size(total)} can go" if found else "there is nothing that can go")
        if found and (yes or not MODE.json):
            _ask("delete all of it", yes=yes)
            for each in found:
                delete(database, each)
            show(f"{size(total)} freed")
    listed = [{"what": e.what, "path": str(e.path), "size_bytes": e.size_bytes, "why": e.why} for e in found]
    emit({"pruned": yes, "size_bytes": total, "unused": listed})


def _ask(question: str, *, yes: bool) -> None:
    """Raises UsageError where nobody can be asked, and ends the command where the answer is no."""
    if yes:
        return
    if MODE.json or not sys.stdin.isatty():
        raise UsageError("nothing was deleted: there is no terminal to ask on", hint="give --yes")
    if not typer.confirm(f"{question}?", err=True):
        say("nothing was deleted")
        raise typer.Exit
