"""What a candidate is held against: the champion of now, and the best release ever, whoever promoted it."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hivetune.base.database import open_database
from hivetune.base.journal import Journal
from hivetune.base.sealed import write_sealed
from hivetune.config import CycleConfig, parse_config
from hivetune.cycle.decide import Action, CycleEnd, decide
from hivetune.cycle.ledger import AGAINST_CHAMPION, GATE, CycleRow, begin_cycle, end_cycle
from hivetune.cycle.loop import Listener, Loop
from hivetune.cycle.observe import observe, rivals_of
from hivetune.cycle.pool import LookCache

CONFIG = {"model": "tiny", "data": {"path": "rows.jsonl"}, "cycle": {"name": "demo"}}
CYCLE = CycleRow("c0", "demo", 10.0, "rows", CONFIG, "/pool", None)


@pytest.fixture
def database(own_home: Path) -> Iterator[sqlite3.Connection]:
    with closing(open_database()) as opened:
        yield opened


def add_release(database: sqlite3.Connection, cycle: CycleRow, version: int, *, promoted: bool) -> None:
    """Register a release of the cycle's run, and make it the champion."""
    database.execute(
        "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, verdict, proof,"
        " created) VALUES ('demo', ?, ?, 'tiny', 'm', ?, 's', 'deploy', '{}', 1.0)",
        (version, str(cycle.run), f"a{version}"),
    )
    if promoted:
        database.execute("INSERT OR REPLACE INTO aliases VALUES ('demo', 'champion', ?)", (version,))
        database.execute(
            "INSERT INTO alias_history (name, alias, version, previous, time, by, reason, forced)"
            " VALUES ('demo', 'champion', ?, NULL, ?, 'test', '', 0)",
            (version, time.time()),
        )


@pytest.mark.parametrize(
    ("end", "promoted", "best"), [("promoted", True, "demo@1"), ("ready", True, "demo@1"), ("ready", False, None)]
)
def test_the_best_ever_may_have_been_promoted_by_a_person(
    database: sqlite3.Connection, end: CycleEnd, promoted: bool, best: str | None
) -> None:
    """With `promote: ask` no release was the best ever, and each champion could lose the tolerance anew."""
    for version, becomes_best in ((1, True), (2, False)):
        cycle = replace(CYCLE, id=f"c{version}", opened=float(version))
        begin_cycle(database, cycle)
        write_sealed(cycle.folder / GATE, {"becomes_best": becomes_best})
        add_release(database, cycle, version, promoted=promoted or version == 2)
        end_cycle(database, cycle, end, "", 20.0)
    rivals = rivals_of(database, "demo")
    assert rivals.champion is not None and rivals.champion.label == "demo@2"
    assert (rivals.best and rivals.best.label) == best


@pytest.mark.parametrize("promote", ["auto", "ask"])
def test_a_registered_candidate_is_measured_against_a_champion_that_came_later(
    database: sqlite3.Connection, promote: str
) -> None:
    """The figures against the champion before were taken for those against this one."""
    begin_cycle(database, CYCLE)
    add_release(database, CYCLE, 1, promoted=False)
    write_sealed(CYCLE.folder / AGAINST_CHAMPION, {"adapter_sha256": "a1", "rival": "demo@7"})
    write_sealed(CYCLE.folder / GATE, {"passed": True, "rivals": ["demo@7"]})
    add_release(database, replace(CYCLE, id="other"), 2, promoted=True)
    config = parse_config({**CONFIG, "cycle": CycleConfig(name="demo", promote=promote).model_dump()})  # type: ignore[arg-type]
    assert decide(observe(config, "demo", LookCache(), 30.0), config.cycle, 30.0).kind == "evaluate"
    write_sealed(CYCLE.folder / AGAINST_CHAMPION, {"adapter_sha256": "a1", "rival": "demo@2"})
    assert decide(observe(config, "demo", LookCache(), 30.0), config.cycle, 30.0).kind == "gate"
    write_sealed(CYCLE.folder / GATE, {"passed": True, "rivals": ["demo@2"]})
    following = {"auto": "promote", "ask": "close"}
    assert decide(observe(config, "demo", LookCache(), 30.0), config.cycle, 30.0).kind == following[promote]


def test_who_is_asked_to_promote_a_release_is_told_which(database: sqlite3.Connection, tmp_path: Path) -> None:
    """`hivetune promote demo`, by the name alone, promotes nothing."""
    begin_cycle(database, CYCLE)
    add_release(database, CYCLE, 3, promoted=False)
    write_sealed(CYCLE.folder / GATE, {"reasons": ["it is better", "and small"], "decisive": 1})
    with Journal(tmp_path / "cycle.jsonl") as journal:
        loop = Loop(parse_config(CONFIG), "demo", journal, Listener())
        notice = loop._notice(Action("close", "ready: it passed", 0.0), "done", "cycle c0 ready", {"end": "ready"})
    assert notice == ("ask", "demo@3", "it is better")
