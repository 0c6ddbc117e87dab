"""Data: what came in from where, the snapshots with their reports, where a row went, and forgetting."""

import contextlib
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from markupsafe import Markup

from hivetune.base.database import home_as_it_is, open_database, open_to_read
from hivetune.base.disk import MANIFEST, read_json, stored_path
from hivetune.base.documents import read_document
from hivetune.dashboard.page import Page, PageRequest, of_this_version
from hivetune.dashboard.watched import Watcher
from hivetune.data.prepare.page import report_body, report_title
from hivetune.data.snapshot import REPORT, ROWS_FILE, SPLITS, RowInfo, select_rows
from hivetune.errors import NotThere, UsageError
from hivetune.release.registry import snapshot_folder

MAX_SNAPSHOTS = 200


def data_page(watcher: Watcher, request: PageRequest) -> Page:
    with home_as_it_is() as database:
        values: dict[str, Any] = {
            "interactions": database.execute("SELECT count(*) FROM interactions").fetchone()[0],
            "forgotten": database.execute("SELECT count(*) FROM forgotten").fetchone()[0],
            "intake": database.execute("SELECT * FROM intake ORDER BY source").fetchall(),
            "snapshots": [],
        }
        snapshots = database.execute(
            "SELECT hash, path, created FROM snapshots ORDER BY created DESC LIMIT ?", (MAX_SNAPSHOTS,)
        ).fetchall()
    for digest, path, created in snapshots:
        shown = {"digest": digest, "created": created, "rows": None, "tokens": 0}  # None: its folder is gone
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = read_json(stored_path(path) / MANIFEST)
            shown |= {"rows": int(manifest["num_rows"]), "tokens": int(manifest["num_tokens"])}
        values["snapshots"].append(shown)
    return Page("data.html", "Data", values)


def report_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show the snapshot's report, in the dashboard's frame."""
    digest = request.named["snapshot"]
    with closing(open_database()) as database:
        folder = snapshot_folder(database, digest)
    if folder is None or not (folder / REPORT).is_file():
        raise NotThere("no snapshot has this id", hint="it may have been deleted; see the page Data")
    path = folder / REPORT
    with of_this_version(path):
        document = read_document(path)
        return Page("report.html", report_title(document), {"body": Markup(report_body(document, ()))})


ROWS_A_PAGE = 50
MAX_SHOWN_CHARS = 2000


def snapshot_rows(digest: str, split: str, number: int) -> tuple[list[RowInfo], int]:
    """Return the rows of page `number` (from 1) and their total. Raises UsageError where the snapshot is gone."""
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}", hint=f"choose one of: {', '.join(SPLITS)}")
    with closing(open_database()) as database:
        folder = snapshot_folder(database, digest)
    if folder is None or not (folder / ROWS_FILE).is_file():
        raise UsageError("the snapshot of this release was deleted; its rows can't be shown")
    with closing(open_to_read(folder / ROWS_FILE, finished=True)) as rows:
        total = rows.execute("SELECT count(*) FROM rows WHERE split = ?", (split,)).fetchone()[0]
        page = (split, ROWS_A_PAGE, ROWS_A_PAGE * (number - 1))
        return list(select_rows(rows, "WHERE split = ? ORDER BY row LIMIT ? OFFSET ?", *page)), total


def turns_of(row: RowInfo) -> Iterator[tuple[str, str]]:
    """Yield role and text of each turn, cut for display."""
    for message in row.messages:
        text = message.content
        if message.tool_calls:
            text += json.dumps(message.tool_calls, ensure_ascii=False)
        yield message.role, text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " ..."
