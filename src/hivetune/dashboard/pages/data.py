"""Data: what came in from where, the snapshots with their reports, where a row went, and forgetting."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import MANIFEST, read_json
from hivetune.base.sealed import read_sealed
from hivetune.dashboard.page import Page, PageRequest, of_this_version
from hivetune.dashboard.rows import uses_of_row
from hivetune.dashboard.watched import Watcher
from hivetune.data.prepare.page import report_body, report_title
from hivetune.data.snapshot import REPORT
from hivetune.errors import NotThere

MOST_SNAPSHOTS = 200


@dataclass(frozen=True)
class ShownSnapshot:
    """`rows` None: its folder is gone."""

    digest: str
    path: Path
    created: float
    rows: int | None
    tokens: int


def data_page(watcher: Watcher, asked: PageRequest) -> Page:
    values: dict[str, Any] = {"intake": [], "snapshots": [], "interactions": 0, "forgotten": 0, "problem": ""}
    if database_path().exists():
        with closing(open_database()) as database:
            values["interactions"] = database.execute("SELECT count(*) FROM interactions").fetchone()[0]
            values["forgotten"] = database.execute("SELECT count(*) FROM forgotten").fetchone()[0]
            values["intake"] = database.execute("SELECT * FROM intake ORDER BY source").fetchall()
            known = database.execute(
                "SELECT hash, path, created FROM snapshots ORDER BY created DESC LIMIT ?", (MOST_SNAPSHOTS,)
            ).fetchall()
        values["snapshots"] = [_shown(*row) for row in known]
    return Page("data.html", "Data", values)


def report_page(watcher: Watcher, asked: PageRequest) -> Page:
    """The snapshot's report, in the dashboard's frame."""
    digest = asked.named["snapshot"]
    with closing(open_database()) as database:
        found = database.execute("SELECT path FROM snapshots WHERE hash = ?", (digest,)).fetchone()
    if found is None or not (Path(found[0]) / REPORT).is_file():
        raise NotThere("there is no such snapshot, or it was deleted", hint="see them on the page Data")
    path = Path(found[0]) / REPORT
    with of_this_version(path):
        document = read_sealed(path)
        return Page("report.html", report_title(document), {"body": Markup(report_body(document, ()))})


def row_page(watcher: Watcher, asked: PageRequest) -> Page:
    """From a row to whatever was made of it."""
    wanted = asked.query.get("place", "").strip()
    uses = list(uses_of_row(wanted)) if wanted and database_path().exists() else []
    return Page("row.html", "Where a row went", {"wanted": wanted, "uses": uses, "problem": ""})


def _shown(digest: str, path: str, created: float) -> ShownSnapshot:
    folder = Path(path)
    if not os.path.isdir(folder):
        return ShownSnapshot(digest, folder, created, None, 0)
    try:
        manifest = read_json(folder / MANIFEST)
        return ShownSnapshot(digest, folder, created, int(manifest["num_rows"]), int(manifest["num_tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ShownSnapshot(digest, folder, created, None, 0)
