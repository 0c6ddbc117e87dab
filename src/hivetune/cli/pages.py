"""`hivetune open RUN`: the newest page of a run in a browser."""

import os
import sys
import webbrowser

from hivetune.cli.arguments import RunArgument
from hivetune.cli.output import MODE, emit, say, show
from hivetune.judge.measure.pages import newest_page
from hivetune.run.find import find_run


def open_page(
    run: RunArgument,
) -> None:
    """Open the newest page of a run: its evaluation, or a comparison on its rows. With --json only its path is said."""
    page = newest_page(find_run(run))
    show(str(page))
    if not MODE.json and (not _has_screen() or not webbrowser.open(page.as_uri())):
        say("no browser can be started here: copy the file, or open it by its path")
    emit({"page": str(page)})


def _has_screen() -> bool:
    """On Linux without one, `webbrowser` would start a program in the terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
