"""What `hivetune cycle` tells people."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from hivetune.base.disk import lock
from hivetune.base.journal import Journal
from hivetune.cli.output import MODE
from hivetune.cli.serve import _run, cycle
from hivetune.cycle.loop import Look
from hivetune.cycle.record import JOURNAL, loop_folder
from hivetune.errors import DoesNotFit


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
