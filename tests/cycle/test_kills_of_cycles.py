"""Real kills at the borders of every station of real cycles: what is left is what the same cycles leave without kills.

Only `make proof NAME=cycle-kills`. The loop is killed as its journal says `begin` or `end`, or a moment later in the
middle of the station; or a process is killed that it started: the worker that trains, a server that answers.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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
BORDERS = (("opened", ""), *((event, each) for each in STATIONS for event in ("begin", "end")), ("closed", ""))
# A process below the loop is killed in the middle of these; each is killed so once a cycle.
BELOW = ("train", "evaluate")
Way = Literal["at once", "a moment later", "a process below"]


@dataclass(frozen=True)
class Kill:
    border: tuple[str, str]  # event and station
    way: Way
    delay_s: float


def kills_of(batch: int, count: int) -> list[Kill]:
    """Draw `count` borders of one batch, each once."""
    draw = random.Random(batch)
    return [
        Kill(border, way_of(draw, *border), draw.uniform(0, MOST_DELAY_S))
        for border in draw.sample(BORDERS, min(count, len(BORDERS)))
    ]


def way_of(draw: random.Random, event: str, station: str) -> Way:
    if event == "begin" and station in BELOW and draw.random() < 0.5:
        return "a process below"
    return "at once" if event != "begin" or draw.random() < 0.5 else "a moment later"


def batch_of(number: int) -> list[dict[str, Any]]:
    rows = make_rows(1000 * number, ROWS if number else FIRST_ROWS)
    return poisoned(rows) if number in POISONED else rows


def loop_once(config: Path, ahead_s: float) -> "subprocess.Popen[bytes]":
    """Run the loop until there is nothing to do now, in a process whose clock is `ahead_s`."""
    script = UNTIMED + (
        "import sys, time\nfrom pathlib import Path\nfrom hivetune.config import load_config\n"
        "from hivetune.cycle.loop import opened\nfrom hivetune.cycle.stations import Listener\n"
        "with opened(load_config(Path(sys.argv[1])), Listener(print)) as loop:\n"
        "    loop.clock = lambda: time.time() + float(sys.argv[2])\n    loop.run(once=True)\n"
    )
    with open(config.parent / "log", "a", encoding="utf-8") as out:
        return subprocess.Popen([sys.executable, "-c", script, str(config), str(ahead_s)], stdout=out, stderr=out)


def lines() -> list[dict[str, Any]]:
    return [*read_journal(home() / "cycles" / NAME / "cycle.jsonl")]


def live_through(config: Path, ahead_s: float, waiting: list[Kill], made: Counter[str]) -> float:
    """Live through one batch: start again after each kill, and with a later clock after a failed station. Returns how
    far the clock is ahead then."""
    for _ in range(10 * KILLS):
        seen = len(lines())
        process = loop_once(config, ahead_s)
        if killed_at_border(process, seen, waiting, made):
            continue
        assert process.returncode == 0, (config.parent / "log").read_text()[-3000:]
        decisions = [entry for entry in lines()[seen:] if entry["event"] == "decision"]
        if "is tried again" not in decisions[-1]["reason"]:
            return ahead_s
        ahead_s += LATER_S
    raise AssertionError("it does not come to an end")


def killed_at_border(process: "subprocess.Popen[bytes]", seen: int, waiting: list[Kill], made: Counter[str]) -> bool:
    """Watch the loop to its end and return whether it was itself killed."""
    while process.poll() is None:
        for entry in lines()[seen:]:
            seen += 1
            border = (entry["event"], entry.get("station", ""))
            kill = next((each for each in waiting if each.border == border), None)
            if kill is None:
                continue
            waiting.remove(kill)
            if kill.way == "a process below":
                made[kill.way] += kill_below(process)
                continue
            time.sleep(kill.delay_s if kill.way == "a moment later" else 0.0)
            process.kill()
            process.wait()
            made[kill.way] += 1
            return True
        time.sleep(0.005)
    return False


def kill_below(process: "subprocess.Popen[bytes]") -> int:
    """Kill the first process that the loop starts in this station; return how many were killed."""
    while process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    return 1
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.005)
    return 0


def test_kills_change_nothing(own_home: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """With the same home and rows, cycles, adapters, accounting and aliases are those of the run without kills."""
    cycles, kills = int(os.environ.get("HIVETUNE_CYCLES", CYCLES)), int(os.environ.get("HIVETUNE_KILLS", KILLS))
    config, made = make_config(tmp_path), Counter[str]()
    shutil.copytree(own_home, tmp_path / "pristine")
    left = []
    for most in (0, kills // cycles):
        shutil.rmtree(own_home)
        shutil.copytree(tmp_path / "pristine", own_home)
        (tmp_path / "rows.jsonl").write_text("")
        ahead_s = 0.0
        for number in range(cycles):
            append_rows(tmp_path / "rows.jsonl", batch_of(number))
            ahead_s = live_through(config, ahead_s, kills_of(number, most), made)
        left.append(summary())
    assert left[0] == left[1]
    ends = [end for _, end, _ in left[0]["cycles"]]
    assert len(ends) == cycles and set(ends) <= {"promoted", "refused"}
    record_property("cycles", len(ends))
    record_property("promoted", ends.count("promoted"))
    record_property("kills", made.total())
    record_property("kills by way", dict(made))
