"""Decisions of a journal, made again."""

from pathlib import Path

from hivetune.base.journal import read_journal
from hivetune.base.typed import from_plain
from hivetune.config import CycleConfig
from hivetune.cycle.decide import Observation, decide


def replayed(journal: Path) -> list[str]:
    """Decide everything in a journal again and return the kinds."""
    kinds = []
    for entry in read_journal(journal):
        if entry["event"] == "decision":
            settings = CycleConfig.model_validate(entry["settings"])
            action = decide(from_plain(Observation, entry["observed"]), settings, entry["now"])
            assert (action.kind, action.reason) == (entry["kind"], entry["reason"])
            assert action.not_before == entry["not_before"]
            kinds.append(action.kind)
    return kinds
