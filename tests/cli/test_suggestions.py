"""`init` asks once how rows of no named layout are read; without a terminal nobody is asked."""

import io
import json
from pathlib import Path

import pytest

from hivetune.cli.init import confirm_columns
from hivetune.config import DataConfig, RunConfig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def settings(tmp_path: Path) -> RunConfig:
    path = tmp_path / "rows.jsonl"
    topics = ("parcel", "letter", "crate", "barrel")
    rows = [{"wish": f"Where is the {t}?", "told": f"In Bonn, {t}.", "more": f"The {t} is ours."} for t in topics]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(model="m", data=DataConfig(path=str(path)))


FIRST = {"prompt": "wish", "completion": "told"}
SECOND = {"prompt": "wish", "completion": "more"}


@pytest.mark.parametrize(
    ("said", "columns"),
    [
        ("\n", FIRST),
        ("y\n", FIRST),
        ("2\n", SECOND),
        ("edit\nprompt=wish,completion=more\n", {"prompt": "wish", "completion": "more"}),
        ("4\nwhat\n2\n", SECOND),
        ("n\n", None),
    ],
)
def test_a_person_is_asked_once(
    said: str, columns: dict[str, str] | None, settings: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(said))
    assert confirm_columns(settings) == (columns, columns is not None)


def test_files_that_need_no_mapping_get_none(
    settings: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mapping holds for all files: one for a stray file rejected all rows of the others."""
    (tmp_path / "good.jsonl").write_text(json.dumps({"prompt": "Where is it?", "completion": "Here."}) + "\n")
    folder = settings.model_copy(update={"data": DataConfig(path=str(tmp_path))})
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert confirm_columns(folder) == (None, False)
    said = capsys.readouterr()
    assert "good.jsonl needs none" in said.err and "prompt=wish,completion=told   left out: more" in said.out


def test_without_a_terminal_the_suggestion_is_not_confirmed(
    settings: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert confirm_columns(settings) == (FIRST, False)
    assert "no terminal to confirm it on" in capsys.readouterr().err
    named = settings.model_copy(update={"data": settings.data.model_copy(update={"columns": SECOND})})
    assert confirm_columns(named) == (None, False)
