"""Releases: verdict and metrics, origin down to the rows, answers side by side, moves_of."""

from contextlib import closing
from pathlib import Path

from markupsafe import Markup

from hivetune.base.database import home_as_it_is, open_database
from hivetune.base.documents import read_document
from hivetune.dashboard.page import Page, PageRequest, of_this_version
from hivetune.dashboard.pages.data import ROWS_A_PAGE, snapshot_rows, turns_of
from hivetune.dashboard.pages.now import quality_charts
from hivetune.dashboard.watched import Watcher, run_id, short_path
from hivetune.errors import HivetuneError, NotThere, UsageError
from hivetune.judge.page import comparison_body
from hivetune.release.registry import Release, find, forgotten_rows, moves_of, releases, returns_to, snapshot_folder
from hivetune.run.folder import EVALUATION
from hivetune.serve.register import explain_release

MAX_DIGITS = 9  # digits of a page's number


def releases_page(watcher: Watcher, request: PageRequest) -> Page:
    with home_as_it_is() as database:
        all_releases = releases(database)
        shown = [(release, forgotten_rows(database, release.snapshot)) for release in reversed(all_releases)]
        names = sorted({release.name for release in all_releases})
        charts = {name: list(quality_charts(database, name)) for name in names}
    return Page("releases.html", "Releases", {"releases": shown, "charts": charts}, live=True)


def release_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show a release. Damaged or pruned files are named; the registry's own facts are always shown."""
    release = named_release(request)
    problem, origin = "", {}
    with closing(open_database()) as database:
        try:
            origin = explain_release(database, release.label)
        except HivetuneError as error:
            problem = error.message
        moves = list(reversed(moves_of(database, release)))
        snapshot = snapshot_folder(database, release.snapshot)
        forgotten = forgotten_rows(database, release.snapshot)
        earlier = returns_to(database, release.name)
    values = {
        "release": release,
        "about": origin,
        "problem": problem,
        "moves": moves,
        "forgotten": forgotten,
        "earlier": earlier,
        "run": run_id(Path(release.run)) if Path(release.run).exists() else "",
        "run_path": short_path(Path(release.run)),
        "snapshot_is_there": snapshot is not None,
        "answers": Markup(_answers(release)),
    }
    return Page("release.html", release.label, values)


def rows_page(watcher: Watcher, request: PageRequest) -> Page:
    """Show the rows that a release was trained on or judged by, a page at a time."""
    release = named_release(request)
    page_text = request.query.get("page", "")
    number = max(1, int(page_text)) if page_text.isdecimal() and len(page_text) <= MAX_DIGITS else 1
    split = request.query.get("split", "train")
    rows, total = snapshot_rows(release.snapshot, split, number)
    values = {
        "release": release,
        "rows": rows,
        "turns_of": turns_of,
        "split": split,
        "page": number,
        "pages": max(1, -(-total // ROWS_A_PAGE)),
        "total": total,
    }
    return Page("rows.html", f"Rows of {release.label}", values)


def named_release(request: PageRequest) -> Release:
    """Return the release that an address names. Raises NotThere."""
    try:
        with closing(open_database()) as database:
            return find(database, f"{request.named['name']}@{request.named['version']}")
    except UsageError as error:
        raise NotThere(error.message, hint=error.hint) from None


def _answers(release: Release) -> str:
    """Return base and tuned answers side by side from the registered evaluation, or "" without one."""
    path = release.folder / EVALUATION
    if release.pruned or not path.is_file():
        return ""
    try:
        evaluation = read_document(path)
        with of_this_version(path):
            return comparison_body({**evaluation, "tuned": {"label": release.label, **evaluation["tuned"]}})
    except UsageError as error:
        return Markup("<p>{}</p>").format(error.message)
