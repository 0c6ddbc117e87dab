"""Children stand still while somebody else needs the machine: no hang, no time of theirs, no orphan."""

import time
from pathlib import Path

import pytest
from tiny_child import Play

from hivetune.process.parent import Child, FixedLimits, start_child
from hivetune.process.protocol import Beat
from hivetune.process.still import moving_s, stands_still, yielding

TINY = str(Path(__file__).with_name("tiny_child.py"))
ITEM_S = 0.5


def working(folder: Path) -> Child:
    child = start_child(Play("work_on"), folder, module=TINY, limits=FixedLimits(start_s=20, item_s=ITEM_S))
    while Beat.ITEM not in child.wait_beats():
        assert not child.ended
    return child


def wait_for_state(child: Child, letters: str) -> None:
    deadline = time.monotonic() + 10
    while child.state() not in letters:
        assert time.monotonic() < deadline, child.state()
        child.wait_beats(0.01)


def test_they_stop_where_they_are_and_their_silence_is_no_hang(tmp_path: Path) -> None:
    child, needed = working(tmp_path / "one"), True
    try:
        with yielding(lambda: needed):
            wait_for_state(child, "T")
            before, began = moving_s(), time.monotonic()
            while time.monotonic() - began < 2 * ITEM_S:
                child.wait_beats(0.1)
            assert stands_still() and moving_s() == before and not child.hung
            needed = False
            wait_for_state(child, "SR")
            assert moving_s() > before
        while not child.hung:  # it never beats again: now that counts
            child.wait_beats(0.1)
    finally:
        child.kill()
        child.outcome()


def test_one_that_is_started_meanwhile_stands_too_and_all_go_on_at_the_end(tmp_path: Path) -> None:
    first = working(tmp_path / "one")
    first.kill()  # its number may be another process's now: it is not signalled
    first.outcome()
    began, moved = time.monotonic(), moving_s()
    with yielding(lambda: True):
        child = start_child(Play("work_on"), tmp_path / "two", module=TINY)
        wait_for_state(child, "T")
    try:
        while Beat.ITEM not in child.wait_beats():
            assert not child.ended
        assert not stands_still()
        assert moving_s() - moved < time.monotonic() - began
    finally:
        child.kill()
        child.outcome()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_they_go_on_when_it_can_not_be_asked_any_more(tmp_path: Path) -> None:
    child, answers = working(tmp_path / "one"), iter([True, True])
    try:
        with yielding(lambda: next(answers)):
            wait_for_state(child, "T")
            wait_for_state(child, "SR")
    finally:
        child.kill()
        child.outcome()
