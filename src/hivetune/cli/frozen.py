"""`hivetune frozen`: the questions that releases are judged by and none may learn."""

from contextlib import closing
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.cli.output import emit, say, show, table
from hivetune.data.frozen import FrozenQuestion, drop_win, general_questions, names_with_wins, wins_of
from hivetune.errors import UsageError
from hivetune.judge.compare import last_said
from hivetune.release.registry import find

_SHOWN_CHARS = 60


def show_frozen(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A release's name; without it, all counts.")
    ] = None,
    drop: Annotated[
        str | None, typer.Option("--drop", metavar="KEY", help="A past win whose right answer has changed.")
    ] = None,
) -> None:
    """Past wins of a release: what it answered rightly, its successors must too. None of them is ever trained."""
    if name is None:
        if drop:
            raise UsageError("--drop needs the name of the release", hint="hivetune frozen NAME")
        _show_counts()
        return
    if drop:
        drop_win(name, drop)
        say(f"{drop} is no longer asked")
    wins = wins_of(name)
    if not wins:
        with closing(open_database()) as database:
            find(database, name)  # a name that is no release's has none for another reason
        say(f"{name} has no past wins yet; promoting a release that was evaluated makes them")
    else:
        table("", ("key", "question", "won by", "from"), [_line(win) for win in wins])
    emit({"name": name, "questions": [_document(win) for win in wins]})


def _show_counts() -> None:
    counts = {name: len(wins_of(name)) for name in names_with_wins()}
    general = len(general_questions())
    for name, count in counts.items():
        show(f"{name}: {count} past wins")
    show(f"general: {general} questions that come with Hivetune")
    emit({"past_wins": counts, "general": general})


def _line(win: FrozenQuestion) -> tuple[str, ...]:
    said = " ".join(last_said(win.messages).split())
    shown = said if len(said) <= _SHOWN_CHARS else said[: _SHOWN_CHARS - 4] + " ..."
    return win.key[:10], shown, win.release or "-", win.source


def _document(win: FrozenQuestion) -> dict[str, Any]:
    return {
        "key": win.key,
        "question": last_said(win.messages),
        "release": win.release,
        "source": win.source,
        "agent": win.agent,
        "category": win.category,
        "checker": dict(win.checker or {}),
    }
