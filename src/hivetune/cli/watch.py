"""`hivetune watch`: a run as it goes, with its loss curve on a terminal, a line per change elsewhere."""

import time
from collections import deque
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from hivetune.base.journal import JournalPlace, read_after
from hivetune.cli.arguments import RunArgument
from hivetune.cli.chart import text_chart
from hivetune.cli.output import MODE, clean, emit, number, out, say
from hivetune.cli.runs import status_line
from hivetune.cli.top import card_line
from hivetune.run.find import find_run
from hivetune.run.folder import EVENTS
from hivetune.run.status import RunStatus, loss_curve, run_status
from hivetune.run.tell import tell_event

_WATCH_S = 1.0
_SHOWN_EVENTS = 6


def watch(run: RunArgument) -> None:
    """Follow a run until it ends; Ctrl-C only stops looking. With --json: one line per change."""
    folder = find_run(run)
    try:
        if out().is_terminal and not MODE.json:
            _draw(folder)
        else:
            _tell_changes(folder)
    except KeyboardInterrupt:
        say("the run goes on" if run_status(folder).state == "running" else "")


class _News:
    """What happens to the run from now on, in words; the newest sample of the machine."""

    def __init__(self, folder: Path):
        self._path, self._place = folder / EVENTS, JournalPlace()
        self.sample: dict[str, object] = {}
        self.read()

    def read(self) -> list[str]:
        told: list[str] = []
        while True:
            followed = read_after(self._path, self._place)
            self._place = followed.place
            if not followed.entries:
                return told
            told += [text for entry in followed.entries if (text := tell_event(entry))]
            self.sample = next(
                (entry for entry in reversed(followed.entries) if entry["event"] == "sample"), self.sample
            )


def _draw(folder: Path) -> None:
    """The screen is drawn in place; what happened stays above it."""
    news = _News(folder)
    events: deque[str] = deque(maxlen=_SHOWN_EVENTS)
    with Live(console=out(), auto_refresh=False) as live:
        while True:
            status = run_status(folder)
            events += news.read()
            live.update(_screen(folder, status, news, events), refresh=True)
            if status.state != "running":
                return
            time.sleep(_WATCH_S)


def _screen(folder: Path, status: RunStatus, news: _News, events: deque[str]) -> Group:
    lines = [status_line(status), *text_chart(loss_curve(folder))]
    speed = f"{number(status.tokens_per_second, 0)} tokens/s" if status.tokens_per_second is not None else ""
    cards = news.sample.get("cards", ())
    assert isinstance(cards, list | tuple)
    machine = [card_line(index, card) for index, card in enumerate(cards)]
    lines += ["; ".join(part for part in (speed, *machine) if part), *events]
    return Group(*(Text(clean(line), no_wrap=True, overflow="ellipsis") for line in lines if line))


def _tell_changes(folder: Path) -> None:
    news = _News(folder)
    last: tuple[int, str] | None = None
    while True:
        status = run_status(folder)
        for text in news.read():
            say(text)
        if (status.step, status.state) != last:
            last = (status.step, status.state)
            say(status_line(status))
            emit(status.document())
        if status.state != "running":
            return
        time.sleep(_WATCH_S)
