"""The one screen: what waits for a person, and what could follow, from the state of runs and releases."""

import contextlib
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from hivetune.base.database import open_database
from hivetune.base.disk import home, lock
from hivetune.base.journal import Journal
from hivetune.cli.status import status
from hivetune.cycle.record import JOURNAL, loop_folder
from hivetune.dashboard.overview import needs_of, overview
from hivetune.release.registry import Release
from hivetune.run.status import RunStatus, State
from hivetune.serve.route import gateway_folder


def run(folder: Path, state: State) -> RunStatus:
    folder.mkdir(parents=True, exist_ok=True)
    return RunStatus(folder, folder.name, state, 20, 40, last_fault="out of memory", problem="run.json: not JSON")


def release(version: int, verdict: str | None, *aliases: str, withdrawn: str = "") -> Release:
    return Release("faq", version, "/runs/one", "m", "0", "1", "2", verdict, {}, 0.0, False, withdrawn, aliases)


CHAMPION = release(1, "deploy", "champion")


def commands(steps: object) -> list[str]:
    return [step.command for step in steps]  # type: ignore[attr-defined]


def test_a_home_that_is_not_there_is_empty_and_stays_so(own_home: Path) -> None:
    found = overview()
    assert (found.running, found.recent, found.champions, found.interactions) == ((), (), (), 0)
    assert commands(found.next) == ["hivetune demo", "hivetune init ROWS"]
    assert not (home() / "hive.db").exists()
    with closing(open_database()) as database:
        database.execute("INSERT INTO interactions (id, content_id, source, row) VALUES ('a', 'a', 'f:1', '{}')")
    assert commands(overview().next) == ["hivetune demo", "hivetune init store"]
    (home() / "hive.db").write_bytes(b"not a database" * 100)
    with pytest.raises(Exception, match=r"damaged|not a database") as caught:
        overview()
    assert not isinstance(caught.value, sqlite3.DatabaseError)


def test_an_evaluation_and_an_export_are_told_while_they_go_on(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(tmp_path / name, "done") for name in ("helpdesk", "coder", "faq")]
    with contextlib.ExitStack() as stack:
        for folder in ("helpdesk/eval", "coder/export", "faq/export-check"):
            stack.enter_context(lock(tmp_path / folder))
        found = overview(runs)
        assert [(each.doing, each.run, each.pid) for each in found.working] == [
            ("eval", "helpdesk", os.getpid()),
            ("export", "coder", os.getpid()),
            ("export-check", "faq", os.getpid()),
        ]
        assert all(abs(each.begun - time.time()) < 60 for each in found.working)
        monkeypatch.setattr("hivetune.dashboard.overview.known_runs", lambda: runs)
        status()
    shown = capsys.readouterr().out
    assert "eval\thelpdesk" in shown and "export\tcoder" in shown and "nothing is running" not in shown
    with lock(gateway_folder()):
        found = overview(runs)
    assert (found.working, found.gateway_pid) == ((), os.getpid())


def test_a_loop_is_shown_and_its_failure_waits_for_a_person(own_home: Path) -> None:
    columns = "id, name, opened, opened_for, config, closed, ending, reason"
    with closing(open_database()) as database:
        values = "('c1', 'faq', 1, 'groups', '{}', 2, 'failed', 'the disk broke')"
        database.execute(f"INSERT INTO cycles ({columns}) VALUES {values}")
    with Journal(loop_folder("faq") / JOURNAL) as journal:
        journal.append("decision", now=5.0, do="wait", reason="12 of 40")
        journal.append("end", cycle="c1", station="train", outcome="failed", words="the disk broke")
    with lock(loop_folder("faq")):
        assert overview().loops[0].pid is not None
    (loop,), (need,) = overview().loops, overview().needs
    assert (loop.name, loop.pid, loop.paused, loop.last) == ("faq", None, False, "train failed: the disk broke")
    assert (loop.action, loop.reason, loop.decided) == ("wait", "12 of 40", 5.0)
    assert need.why == "the newest cycle of faq failed: the disk broke"
    assert need.command == "hivetune cycle status faq"


def test_what_stopped_by_itself_waits_for_a_person(tmp_path: Path) -> None:
    states: tuple[State, ...] = ("interrupted", "failed", "damaged", "done", "stopped", "running")
    runs = [run(tmp_path / state, state) for state in states]
    steps = [*needs_of(runs, [CHAMPION], {"faq@1": 3})]
    assert [(step.why, step.command) for step in steps] == [
        ("interrupted was interrupted at step 20", "hivetune train interrupted"),
        ("failed failed: out of memory", "hivetune show failed"),
        ("damaged is damaged: run.json: not JSON", "hivetune show damaged"),
        ("faq@1 was trained or judged on at least 3 rows that were forgotten since", "hivetune releases faq@1"),
    ]


@pytest.mark.parametrize(
    ("candidate", "asked"),
    [
        (release(2, "deploy", "candidate"), ["hivetune promote faq@2"]),
        (release(2, "iterate", "candidate"), []),
        (release(2, "deploy", "candidate", withdrawn="slow"), []),
        (release(2, "deploy"), []),
    ],
)
def test_a_candidate_that_passed_the_gate_waits(candidate: Release, asked: list[str]) -> None:
    assert commands(needs_of([], [CHAMPION, candidate], {"faq@1": 0, "faq@2": 0})) == asked
