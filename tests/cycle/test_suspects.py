"""The cause of a worse model: rows are blamed only beside a champion that is a replay without them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import hivetune.cycle.acts.release as acts
from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, write_json
from hivetune.base.sealed import write_sealed
from hivetune.config import RunConfig
from hivetune.cycle.acts.context import ActContext
from hivetune.cycle.decide import STATIONS, CycleEnd, OpenCycle
from hivetune.cycle.ledger import GATE, CycleRow, begin_cycle, suspect_rows
from hivetune.release.registry import Release

OLD, NEW = frozenset(f"old{n}" for n in range(100)), frozenset(f"new{n}" for n in range(50))


def settings(**others: Any) -> dict[str, Any]:
    data = {"path": "rows.jsonl", "leave_out": others.pop("leave_out", None)}
    return RunConfig(model="m", data=data, **others).model_dump(mode="json", exclude={"cycle"})


@pytest.fixture
def refused(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Close a cycle of OLD and NEW rows whose candidate is worse than the champion; return the words and the
    suspects."""

    def close(
        candidate: dict[str, Any], champion: dict[str, Any], behind: frozenset[str] = OLD
    ) -> tuple[str, set[str]]:
        release = Release("demo", 1, "/run", "m", "base", "adapter", "snapshot", "deploy", {}, 0.0)
        write_json(release.folder / MANIFEST, {"settings": champion})
        cycle = CycleRow("c1", "demo", 1.0, "rows", {}, "/pool", "demo@1")
        write_sealed(cycle.folder / GATE, {"parts": {"best": {"verdict": "abort"}}})
        monkeypatch.setattr(acts, "releases", lambda database, name: [release])
        monkeypatch.setattr(acts, "rows_behind", lambda database, release: behind)
        monkeypatch.setattr(acts, "_rows_of", lambda cycle: OLD | NEW)
        monkeypatch.setattr(acts, "read_record", lambda run: {"identity": {"settings": candidate, "model": "base"}})
        opened = SimpleNamespace(open=OpenCycle("c1", done=frozenset(STATIONS[:4]), passed=False), failed=None)
        context = SimpleNamespace(
            config=SimpleNamespace(cycle=None), now=2.0, details={}, cycle=lambda: cycle, observed=opened
        )
        monkeypatch.setattr(acts, "ending", lambda *_: (cast(CycleEnd, "refused"), "the gate refused it"))
        with open_database() as database:
            begin_cycle(database, cycle)
            words = acts.close_cycle(cast(ActContext, context))
            return words, set(suspect_rows(database, "demo"))

    return close


def test_rows_are_suspect_beside_a_champion_that_was_trained_alike_without_them(refused: Any) -> None:
    words, suspects = refused(settings(leave_out="c1.jsonl"), settings(leave_out="c0.jsonl"))
    assert suspects == NEW and "50 rows that came with it are set aside as suspect" in words
    assert "hivetune cycle now" in words and "hivetune cycle admit" in words


def test_a_shorter_training_by_the_persons_own_setting_blames_no_row(refused: Any) -> None:
    """As seen in use: a champion of 18 steps, a candidate of 12, and 50 ordinary rows."""
    words, suspects = refused(settings(max_steps=12), settings(max_steps=18))
    assert not suspects
    assert words.endswith(
        "its rows are not blamed, since the champion was trained otherwise (max_steps: 18 there, 12 here)"
    )


def test_more_rows_in_as_many_steps_blame_no_row(refused: Any) -> None:
    words, suspects = refused(settings(max_steps=18), settings(max_steps=18))
    assert not suspects and "each row was read less often" in words


def test_rows_that_the_champion_had_and_the_candidate_had_not_may_be_what_is_missing(refused: Any) -> None:
    more = OLD | {f"gone{n}" for n in range(10)}
    words, suspects = refused(settings(), settings(), more)
    assert not suspects and "10 of the champion's 110 rows were left out" in words
