"""The command `collect`: interactions from files, tables and streams into the store, exactly once."""

import threading
import time
from contextlib import closing
from types import FrameType
from typing import Annotated, Any

import typer

from hivetune.base.database import database_path, open_database
from hivetune.base.paths import spelled
from hivetune.cli.output import MODE, PLAIN_LINE_EVERY_S, emit, parts, say, table
from hivetune.data.intake.collect import Collected
from hivetune.data.intake.collect import collect as run_collect
from hivetune.data.intake.interactions import Tally, iter_refused
from hivetune.data.intake.sources.parse import parse_sources
from hivetune.errors import Stopped
from hivetune.process.stop import take_stops

SHOWN_REFUSED = 5


def collect(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC",
            help="A JSONL file, folder or glob; sqlite:PATH?table=T; redis://HOST/DB?stream=S; redis+cluster://...",
            show_default=False,
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep collecting until stopped.")] = False,
) -> None:
    """Copy interactions into the store, each exactly once. Killing or repeating the command loses and doubles none.

    SRC is a JSON Lines file, a folder of them or a quoted glob (through rotation, .gz and .zst too);
    sqlite:PATH?table=T[&map=prompt:question,...][&cursor=COLUMN]; redis://[:PASSWORD@]HOST:PORT/DB?stream=S[&group=G];
    rediss:// for TLS; redis+cluster://HOST:PORT?prefix=P&partitions=N for the streams P:{0}:events, P:{1}:events, ...
    """
    readers = parse_sources(sources, follow=follow)
    started = time.time()
    stop, heard = threading.Event(), []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        heard.append(number)
        stop.set()

    take_stops(on_signal)
    collected = run_collect(readers, follow=follow, stop=stop, tick=_Ticker(follow))
    document = _document(collected, started)
    if not heard or follow:
        emit(document)
    _show(document)
    if heard:
        raise Stopped("stopped; every acknowledged row is in the store", signal_number=heard[0])


class _Ticker:
    """A callback that prints new notes, and the counts every ten seconds; JSON Lines when following."""

    def __init__(self, follow: bool):
        self._follow = follow
        self._reported: set[str] = set()
        self._last, self._last_count = time.monotonic(), 0

    def __call__(self, collected: Collected) -> None:
        for reader in list(collected.readers):
            for note in list(reader.notes):
                if note not in self._reported:
                    self._reported.add(note)
                    say(f"note: {note}")
        every_s = 1.0 if MODE.json and self._follow else PLAIN_LINE_EVERY_S
        if time.monotonic() - self._last < every_s:
            return
        self._last = time.monotonic()
        total = collected.total()
        if total.delivered == self._last_count:
            return
        self._last_count = total.delivered
        if self._follow:
            emit({"event": "progress", **_counts(total)})
        say(
            f"{total.delivered:,} delivered = {total.stored:,} new + {total.duplicates:,} known"
            f" + {total.refused:,} refused + {total.forgotten:,} forgotten"
        )


def _document(collected: Collected, started: float) -> dict[str, Any]:
    with closing(open_database()) as database:
        rows = database.execute("SELECT count(*) FROM interactions").fetchone()[0]
        refused = list(iter_refused(database, since=started, limit=SHOWN_REFUSED))
    sources = [
        {"source": r.name, **_counts(collected.tallies[r.name]), "waiting": tuple(r.waiting), "notes": tuple(r.notes)}
        for r in collected.readers
    ]
    return {
        "event": "done",
        "store": str(database_path()),
        "interactions": rows,
        **_counts(collected.total()),
        "sources": sources,
        "refused_rows": [dict(zip(("source", "reason", "hint"), row, strict=True)) for row in refused],
    }


def _counts(tally: Tally) -> dict[str, Any]:
    return parts(tally, "delivered", "stored", "duplicates", "refused", "forgotten", "reasons")


def _show(document: dict[str, Any]) -> None:
    if MODE.json:
        return
    columns = ("source", "delivered", "stored", "duplicates", "refused", "forgotten")
    table("", columns, [[source[column] for column in columns] for source in document["sources"]])
    for source in document["sources"]:
        for path in source["waiting"]:
            say(f"{spelled(path)}: the last line is incomplete; it is read once it is finished")
    for row in document["refused_rows"]:
        say(f"{spelled(row['source'])}: {row['reason']}: {row['hint']}")
    if document["refused"] > len(document["refused_rows"]):
        say(f"... and {document['refused'] - len(document['refused_rows'])} more in the table `refused`")
    say(f"{document['interactions']:,} interactions in {document['store']}")
