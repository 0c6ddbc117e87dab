"""`hivetune data forget`: a user, session, source or row out of the store, and what it already taints."""

from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.cli.output import MODE, emit, say, table
from hivetune.data.forget import ForgetKind, Forgotten
from hivetune.data.forget import forget as run_forget
from hivetune.errors import UsageError


def forget(
    user: Annotated[str | None, typer.Option(help="All interactions of this user.")] = None,
    session: Annotated[str | None, typer.Option(help="All interactions of this session.")] = None,
    source: Annotated[
        str | None, typer.Option(help="All that came from this file, table (path#table) or stream.")
    ] = None,
    row: Annotated[
        str | None, typer.Option(help="One interaction, by id or place (file:line), and its copies.")
    ] = None,
) -> None:
    """Remove a user, session, source or row from the store for good, and name each snapshot, run and release it taints.

    Later collections pass it over. Files it came from are not touched, nor are snapshots and runs: prepare and train
    again without it, then delete what is named here.
    """
    options: dict[ForgetKind, str | None] = {"user": user, "session": session, "source": source, "row": row}
    chosen = [(kind, value) for kind, value in options.items() if value]
    if len(chosen) != 1:
        raise UsageError("say whom to forget", hint="one of --user, --session, --source, --row")
    database = open_database()
    try:
        forgotten = run_forget(database, *chosen[0])
    finally:
        database.close()
    emit(_document(forgotten))
    _show(forgotten)


def _document(forgotten: Forgotten) -> dict[str, Any]:
    return {
        "kind": forgotten.kind,
        "value": forgotten.value,
        "interactions": forgotten.interactions,
        "refused": forgotten.refused,
        "snapshots": [
            {
                "hash": taint.snapshot,
                "path": taint.path,
                "rows": taint.rows,
                "runs": list(taint.runs),
                "releases": list(taint.releases),
            }
            for taint in forgotten.taints
        ],
        "runs": sorted({run for taint in forgotten.taints for run in taint.runs}),
        "releases": sorted({release for taint in forgotten.taints for release in taint.releases}),
        "past_wins": forgotten.past_wins,
        "unchecked": list(forgotten.unchecked),
    }


def _show(forgotten: Forgotten) -> None:
    if MODE.json:
        return
    say(
        f"{forgotten.kind} {forgotten.value}: {forgotten.interactions:,} interactions removed, and kept out from now on"
    )
    if forgotten.past_wins:
        say(f"{forgotten.past_wins} past wins were made of them and are removed")
    if forgotten.taints:
        rows = [
            [
                taint.path or taint.snapshot,
                taint.rows,
                "\n".join(taint.runs) or "-",
                "\n".join(taint.releases) or "-",
            ]
            for taint in forgotten.taints
        ]
        table("Tainted", ("snapshot", "rows", "runs", "releases"), rows, numeric=("rows",))
    else:
        say("no snapshot that is there holds any of it")
    for path in forgotten.unchecked:
        say(f"{path}: the snapshot is gone, so its rows could not be looked at")
