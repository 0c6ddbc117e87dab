"""What `hivetune cycle` prints at its end."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from hivetune.cli.output import MODE
from hivetune.cli.serve import _run
from hivetune.cycle.loop import Look
from hivetune.errors import DoesNotFit


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
