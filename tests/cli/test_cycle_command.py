"""What `hivetune cycle --dry-run` tells people."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from hivetune.base.database import open_database
from hivetune.base.disk import lock
from hivetune.cli.cycle import _run, cycle, observation_lines
from hivetune.cli.output import MODE
from hivetune.cycle.decide import FailedAct, Observation, OpenCycle, Permission
from hivetune.cycle.ledger import begin_act, end_act, loop_folder


def test_a_look_before_a_cycle_is_told_in_words() -> None:
    seen = Observation(
        desired="helpdesk@1", served="helpdesk@1", new_groups=79, predicted_hours=0.5, disk_needed_bytes=7 * 10**8
    )
    assert list(observation_lines(seen, 50)) == [
        ("champion", "helpdesk@1"),
        ("new groups of rows", "79 (cycle.after_rows: 50)"),
        ("training", "at most 30 min"),
        ("disk", "700 MB needed, 0 B free"),
        ("long work", "may continue: no window is set"),
    ]


def test_a_loop_that_does_not_run_is_not_said_to_continue(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop_folder("helpdesk").mkdir(parents=True)
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
    with closing(open_database()) as database:
        number = begin_act(database, "helpdesk", None, "train", 1.0)
        end_act(database, number, "failed", 2.0, "the disk broke", {"exit_code": 5})
    loop = SimpleNamespace(name="helpdesk", run=lambda once: None)
    with pytest.raises(typer.Exit) as raised:
        _run(loop, once=True)  # type: ignore[arg-type]
    document = json.loads(capsys.readouterr().out)
    assert (raised.value.exit_code, document["name"], document["error"]["message"]) == (5, "helpdesk", "the disk broke")


def test_an_act_whose_process_died_is_interrupted(
    own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODE, "json", True)
    with closing(open_database()) as database:
        begin_act(database, "helpdesk", None, "train", 1.0)
    loop_folder("helpdesk").mkdir(parents=True)
    cycle("status")
    with lock(loop_folder("helpdesk")):
        cycle("status")
    died, runs = (json.loads(line)["cycles"][0]["acts"][0] for line in capsys.readouterr().out.splitlines())
    assert (died["outcome"], runs["outcome"]) == ("interrupted", None)


def test_a_look_at_trouble_leaves_nothing_out() -> None:
    seen = Observation(
        paused=True,
        open=OpenCycle("c1", done=frozenset({"train", "snapshot"})),
        failed=FailedAct("train", 2, 0.0, "out of memory"),
        allowed=Permission(False, None, 5.0, "the window opens at 22:00"),
        watch_failed="more complaints",
        forgotten_rows=2,
        unusable="no row is left",
    )
    told = dict(observation_lines(seen, 50))
    assert told == {
        "champion": "none yet",
        "open cycle": "c1, for rows; done: snapshot, train",
        "failed last": "train, 2 in a row: out of memory",
        "long work": "waits: the window opens at 22:00",
        "worse than before": "more complaints",
        "no rows": "no row is left",
        "forgotten rows in the champion": "2",
        "requested": "paused",
    }
