"""Journals of earlier versions are replayed: each decision is made again from its own line."""

from pathlib import Path

import pytest
from cycle.replay import replayed

JOURNALS = sorted((Path(__file__).parent / "journals").glob("*.jsonl"))


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.stem)
def test_every_decision_of_a_journal_is_made_again(journal: Path) -> None:
    """The journal is of a run with real kills: three batches of rows, one of them poisoned."""
    assert set(replayed(journal)) >= {
        "open",
        "snapshot",
        "train",
        "gate",
        "register",
        "promote",
        "watch",
        "close",
        "wait",
    }


def test_there_are_journals() -> None:
    assert JOURNALS
