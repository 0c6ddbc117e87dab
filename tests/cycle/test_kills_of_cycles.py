"""Real kills at the borders of every station of real cycles: what is left is what the same cycles leave without kills.

Only `make proof NAME=cycle-kills`. The loop is killed as its journal says `begin` or `end`, or a moment later in the
middle of the station; or a process is killed that it started: the worker that trains, a server that answers.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cycle.small import Kill, KilledLoop, append_rows, make_config, make_rows, poisoned, summary

pytestmark = pytest.mark.proof

# All 14 borders of each cycle; those that do not come, as of a promotion that is refused, kill nothing.
CYCLES, KILLS, POISONED = 16, 224, (1, 6, 11)  # the batches are counted from 0
FIRST_ROWS, ROWS = 120, 60
MOST_DELAY_S = 2.0
STATIONS = ("rows", "train", "evaluate", "judge", "register", "promote")
BORDERS = (("opened", ""), *((event, each) for each in STATIONS for event in ("begin", "end")), ("closed", ""))
# A process below the loop is killed in the middle of these; each is killed so once a cycle.
BELOW = ("train", "evaluate")


def drawn(draw: random.Random, border: tuple[str, str]) -> Kill:
    event, station = border
    if event == "begin" and station in BELOW and draw.random() < 0.5:
        return Kill(border, "a process below")
    if event != "begin" or draw.random() < 0.5:
        return Kill(border)
    return Kill(border, "a moment later", draw.uniform(0, MOST_DELAY_S))


def test_kills_change_nothing(own_home: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """With the same home and rows, cycles, adapters, accounting and aliases are those of the run without kills."""
    cycles, kills = int(os.environ.get("HIVETUNE_CYCLES", CYCLES)), int(os.environ.get("HIVETUNE_KILLS", KILLS))
    config = make_config(tmp_path)
    shutil.copytree(own_home, tmp_path / "pristine")
    left = []
    for most in (0, kills // cycles):
        shutil.rmtree(own_home)
        shutil.copytree(tmp_path / "pristine", own_home)
        (tmp_path / "rows.jsonl").write_text("")
        loop = KilledLoop(config, tmp_path / "log")
        for number in range(cycles):
            rows = make_rows(1000 * number, ROWS if number else FIRST_ROWS)
            append_rows(tmp_path / "rows.jsonl", poisoned(rows) if number in POISONED else rows)
            draw = random.Random(number)
            loop.once([drawn(draw, border) for border in draw.sample(BORDERS, min(most, len(BORDERS)))])
        left.append(summary())
    assert left[0] == left[1]
    ends = [end for _, end, _ in left[0]["cycles"]]
    assert len(ends) == cycles and set(ends) <= {"promoted", "refused"}
    record_property("cycles", len(ends))
    record_property("promoted", ends.count("promoted"))
    record_property("kills", loop.made.total())
    record_property("kills by way", dict(loop.made))
