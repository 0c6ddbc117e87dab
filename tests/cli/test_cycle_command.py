"""What `hivetune cycle` tells people."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from hivetune.base.disk import lock
from hivetune.base.journal import Journal
from hivetune.cli.cycle import _run, cycle, look_lines
from hivetune.cli.output import MODE
from hivetune.cycle.loop import Look
from hivetune.cycle.record import JOURNAL, CycleRow, loop_folder
from hivetune.cycle.rows import RowsNow
from hivetune.cycle.window import Permission
from hivetune.errors import DoesNotFit

CYCLE = CycleRow("c1", "helpdesk", 1.0, "rows", {}, None)


def test_a_look_before_a_cycle_is_told_in_words() -> None:
    seen = Look("wait", "79 of 100", champion="helpdesk@1", rows=RowsNow(None, 79, 0.5, 7 * 10**8))
    assert list(look_lines(seen, 100)) == [
        ("champion", "helpdesk@1"),
        ("new groups of rows", "79 (cycle.after_rows: 100)"),
        ("training", "at most 30 min"),
        ("disk", "700 MB needed"),
        ("long work", "may continue: no window is set"),
    ]


def test_a_look_at_trouble_leaves_nothing_out() -> None:
    seen = Look(
        "wait",
        "",
        open=replace(CYCLE, station="train", failures=2, words="out of memory"),
        rows=RowsNow(problem="no row is left"),
        allowed=Permission(False, None, 5.0, "the window opens at 22:00"),
    )
    assert dict(look_lines(seen, 50)) == {
        "champion": "none yet",
        "open cycle": "c1, for rows; at: train",
        "failed last": "train, 2 in a row: out of memory",
        "long work": "waits: the window opens at 22:00",
        "no rows": "no row is left",
    }


def test_a_loop_that_does_not_run_is_not_said_to_continue(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(loop_folder("helpdesk") / JOURNAL).close()
    for word, said in (("pause", "is paused"), ("resume", "is not paused any more"), ("now", "starts a cycle when it")):
        cycle(word)
        told = capsys.readouterr().out
        assert said in told and "helpdesk does not run; start it: hivetune cycle CONFIG" in told
    with lock(loop_folder("helpdesk")):
        cycle("resume")
    assert capsys.readouterr().out == "helpdesk continues\n"


def test_a_loop_that_failed_prints_one_document(
    own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It printed its result, and the error as a second document behind it: no JSON."""
    monkeypatch.setattr(MODE, "json", True)
    failure = DoesNotFit("the disk broke")
    loop = SimpleNamespace(name="helpdesk", failure=failure, run=lambda once: Look("wait", "train failed"))
    with pytest.raises(typer.Exit) as raised:
        _run(loop, once=True)  # type: ignore[arg-type]
    document = json.loads(capsys.readouterr().out)
    assert (raised.value.exit_code, document["name"], document["error"]["message"]) == (5, "helpdesk", "the disk broke")
