"""`hivetune doctor FILE_OR_TEXT`: pasted errors and logs of any kind, explained without a bare traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.cli import doctor as command
from hivetune.cli.doctor import LOG_BYTES, explain_text
from hivetune.cli.output import MODE
from hivetune.errors import UsageError
from hivetune.machine.findings import Judgement, MachineFinding

ILLEGAL = "RuntimeError: HIP error: an illegal memory access was encountered"


@pytest.fixture(autouse=True)
def as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "json", True)
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)


def told(given: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    explain_text(given)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_pasted_error_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(ILLEGAL, capsys)
    assert document["known"] and document["fault"] == "device-memory-fault" and document["retry"]
    assert [remedy["name"] for remedy in document["remedies"][:2]] == ["blas", "isolate"]
    assert (
        all(remedy["says"] for remedy in document["remedies"]) and document["advice"] and document["quote"] == ILLEGAL
    )


def test_a_file_and_a_run_folder_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "child.log").write_text(f"step 1\n{ILLEGAL}\n")
    assert told(str(tmp_path / "child.log"), capsys) == told(str(tmp_path), capsys) == told(ILLEGAL, capsys)


def test_of_a_long_log_the_end_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.log").write_bytes(b"CUDA out of memory\n" + b"\xff\x00 noise\n" * LOG_BYTES + ILLEGAL.encode())
    assert told(str(tmp_path / "long.log"), capsys)["fault"] == "device-memory-fault"


def test_an_unknown_text_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    document = told("the printer is on fire", capsys)
    assert not document["known"] and "hivetune doctor" in document["advice"]


@pytest.mark.parametrize("given", ["", "  ", "/no/such.log", "typo.log", "typo.txt"])
def test_a_file_that_is_not_there_is_no_text(given: str) -> None:
    with pytest.raises(UsageError, match="no such file"):
        explain_text(given)


def test_a_config_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a config") as refused:
        explain_text(str(tmp_path / "run.yaml"))
    assert "--config" in refused.value.hint


@given(st.text(max_size=400).filter(lambda text: text != "-"))
@settings(max_examples=60, deadline=None)
def test_any_text_has_an_answer(given: str) -> None:
    try:
        explain_text(given)
    except UsageError as error:
        assert error.message


def test_a_machine_that_cannot_train_is_one_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fatal = MachineFinding("no-torch", "fatal", "torch is missing", "", "pip install torch")
    monkeypatch.setattr(command, "judge_machine", lambda facts, dtype: Judgement((fatal,)))
    monkeypatch.setattr(MODE, "json", True)
    with pytest.raises(typer.Exit) as raised:
        command.doctor()
    document = json.loads(capsys.readouterr().out)
    assert raised.value.exit_code == 4 and not document["fit"]
    assert document["error"]["message"] == "cannot train here: torch is missing"


def test_names_of_the_account_are_not_repeated(tmp_path: Path) -> None:
    home = tmp_path / "anna"
    log = f"OSError: [Errno 28] No space left on device: '{home}/runs/x'"
    command = [sys.executable, "-m", "hivetune", "doctor", "-", "--json"]
    ended = subprocess.run(
        command, input=log, capture_output=True, text=True, check=False, env={**os.environ, "HOME": str(home)}
    )
    document = json.loads(ended.stdout)
    assert document["fault"] == "disk-full" and str(home) not in ended.stdout and "~/runs/x" in document["quote"]
