"""Real kills at the borders of every station of real cycles: what is left is what the same cycles leave without kills.

Only `make proof NAME=cycle-kills`. The loop is killed as its journal says `begin` or `end`, or a moment later in the
middle of the station; or a process is killed that it started: the worker that trains, a server that answers. Begun
again, it goes on behind the last batch that was finished.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from cycle.small import NAME, UNTIMED, append_rows, make_config, make_rows, poisoned, summary

from hivetune.base.disk import home
from hivetune.base.journal import read_journal

pytestmark = pytest.mark.proof

# All 14 borders of each cycle; those that do not come, as of a promotion that is refused, kill nothing.
CYCLES, KILLS, POISONED = 16, 224, (1, 6, 11)  # the batches are counted from 0
FIRST_ROWS, ROWS = 120, 60
MOST_DELAY_S = 2.0
LATER_S = 3600  # by which a clock is ahead after a station failed: its pause is over then
STATIONS = ("rows", "train", "evaluate", "judge", "register", "promote")
# A process below the loop is killed in the middle of these; each is killed so once a cycle.
BELOW = ("train", "evaluate")
Way = Literal["at once", "a moment later", "a process below"]


@dataclass(frozen=True)
class Kill:
    event: str
    station: str
    way: Way
    delay_s: float


def kills_of(batch: int, count: int) -> list[Kill]:
    """Draw `count` borders of one batch, each once."""
    draw = random.Random(batch)
    borders = [
        ("opened", ""),
        *((event, station) for station in STATIONS for event in ("begin", "end")),
        ("closed", ""),
    ]
    chosen = draw.sample(borders, min(count, len(borders)))
    return [
        Kill(event, station, way_of(draw, event, station), draw.uniform(0, MOST_DELAY_S)) for event, station in chosen
    ]


def way_of(draw: random.Random, event: str, station: str) -> Way:
    if event == "begin" and station in BELOW and draw.random() < 0.5:
        return "a process below"
    return "at once" if event != "begin" or draw.random() < 0.5 else "a moment later"


def batch_of(number: int) -> list[dict[str, Any]]:
    rows = make_rows(1000 * number, ROWS if number else FIRST_ROWS)
    return poisoned(rows) if number in POISONED else rows


def loop_once(config: Path, ahead_s: float, log: Path) -> "subprocess.Popen[bytes]":
    """Run the loop until there is nothing to do now, in a process whose clock is `ahead_s`."""
    script = UNTIMED + (
        "import sys, time\nfrom pathlib import Path\nfrom hivetune.config import load_config\n"
        "from hivetune.cycle.loop import Listener, opened\n"
        "with opened(load_config(Path(sys.argv[1])), Listener(print)) as loop:\n"
        "    loop.clock = lambda: time.time() + float(sys.argv[2])\n    loop.run(once=True)\n"
    )
    with open(log, "a", encoding="utf-8") as out:
        return subprocess.Popen([sys.executable, "-c", script, str(config), str(ahead_s)], stdout=out, stderr=out)


@dataclass
class Life:
    """The progress of the proof. `done`: batches of this half. `made`: kills so far, by kind."""

    path: Path
    half: Literal["calm", "killed"] = "calm"
    done: int = 0
    ahead_s: float = 0.0
    made: dict[str, int] = field(default_factory=dict)
    calm: dict[str, Any] = field(default_factory=dict)

    def load(self) -> "Life":
        if self.path.exists():
            for name, value in json.loads(self.path.read_text()).items():
                setattr(self, name, value)
        return self

    def count(self, way: Way) -> None:
        self.made[way] = self.made.get(way, 0) + 1
        self.save()  # a proof that is stopped in the middle of a batch has made it all the same

    def save(self) -> None:
        known = {name: value for name, value in vars(self).items() if name != "path"}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.rename(self.path)


def journal() -> Path:
    return home() / "cycles" / NAME / "cycle.jsonl"


def live_through(life: Life, config: Path, waiting: list[Kill]) -> None:
    """Live through one batch: start again after each kill, and with a later clock after a failed act."""
    log = config.parent / "log"
    for _ in range(10 * KILLS):
        seen = len(list(read_journal(journal())))
        process = loop_once(config, life.ahead_s, log)
        if killed_at_border(life, process, seen, waiting):
            continue
        assert process.returncode == 0, log.read_text()[-3000:]
        decisions = [entry for entry in list(read_journal(journal()))[seen:] if entry["event"] == "decision"]
        if "is tried again" not in decisions[-1]["reason"]:
            return
        life.ahead_s += LATER_S
    raise AssertionError("it does not come to an end")


def killed_at_border(life: Life, process: "subprocess.Popen[bytes]", seen: int, waiting: list[Kill]) -> bool:
    """Watch the loop to its end and return whether it was itself killed."""
    while process.poll() is None:
        for entry in list(read_journal(journal()))[seen:]:
            seen += 1
            kill = next(
                (k for k in waiting if (k.event, k.station) == (entry["event"], entry.get("station", ""))), None
            )
            if kill is None:
                continue
            waiting.remove(kill)
            if kill.way == "a process below":
                kill_below(life, process)
                continue
            if kill.way == "a moment later":
                time.sleep(kill.delay_s)
            process.kill()
            process.wait()
            life.count(kill.way)
            return True
        time.sleep(0.005)
    return False


def kill_below(life: Life, process: "subprocess.Popen[bytes]") -> None:
    """Kill the first process that the loop starts in this station."""
    while process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    life.count("a process below")
                    return
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.005)


def test_kills_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """With the same home and rows, cycles, adapters, accounting and aliases are those of the run without kills."""
    work = Path(os.environ.get("HIVETUNE_PROOF_FOLDER", tmp_path))
    cycles, kills = int(os.environ.get("HIVETUNE_CYCLES", CYCLES)), int(os.environ.get("HIVETUNE_KILLS", KILLS))
    monkeypatch.setenv("HIVETUNE_HOME", str(work / "home"))
    life = Life(work / "life.json").load()
    if not life.path.exists():
        shutil.rmtree(work / "home", ignore_errors=True)
        make_config(work)
        shutil.rmtree(work / "pristine", ignore_errors=True)
        shutil.copytree(work / "home", work / "pristine")
        life.save()
    for half in ("calm", "killed"):
        if life.half != half:
            continue
        for number in range(life.done, cycles):
            (work / "rows.jsonl").write_text("")  # whole again, should this batch have been stopped in the middle
            for earlier in range(number + 1):
                append_rows(work / "rows.jsonl", batch_of(earlier))
            live_through(life, work / "cycle.yaml", kills_of(number, kills // cycles) if half == "killed" else [])
            life.done = number + 1
            life.save()
        if half == "calm":
            life.calm = json.loads(json.dumps(summary()))
            shutil.rmtree(work / "home")
            shutil.copytree(work / "pristine", work / "home")
            life.half, life.done, life.ahead_s = "killed", 0, 0.0
            life.save()
    assert json.loads(json.dumps(summary())) == life.calm
    ends = [end for _, end, _ in life.calm["cycles"]]
    assert len(ends) == cycles and set(ends) <= {"promoted", "refused"}
    record_property("cycles", len(ends))
    record_property("promoted", ends.count("promoted"))
    record_property("kills", sum(life.made.values()))
    record_property("kills by way", life.made)
