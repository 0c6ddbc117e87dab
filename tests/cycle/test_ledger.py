"""The loop's memory: cycles that open once, failures in a row, acts whose process died."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import hivetune.cycle.observe
from hivetune.base.database import open_database
from hivetune.base.sealed import write_sealed
from hivetune.config import parse_config
from hivetune.cycle.decide import STATIONS, FailedAct, OpenCycle, Station, decide
from hivetune.cycle.ledger import (
    GATE,
    KILLS_A_FAILURE,
    Act,
    CycleRow,
    acts_of,
    admit_rows,
    begin_act,
    begin_cycle,
    cycles_of,
    end_act,
    end_cycle,
    failed_in_a_row,
    last_failure,
    settle_interrupted,
    suspect_rows,
    trained_rows,
)
from hivetune.cycle.observe import Rivals, looks_at, observe
from hivetune.cycle.pool import LookCache
from hivetune.release.registry import Release

CYCLE = CycleRow("a1", "demo", 10.0, "rows", {"model": "tiny"}, "/pool", None)


def test_the_same_cycle_is_opened_once_and_again_only_after_a_failure() -> None:
    with closing(open_database()) as database:
        assert begin_cycle(database, CYCLE) and not begin_cycle(database, CYCLE)
        end_cycle(database, CYCLE, "failed", "no disk", 20.0)
        asked = replace(CYCLE, opened=25.0, opened_for="request", config={"model": "tiny", "budget": 9})
        assert begin_cycle(database, asked) and not begin_cycle(database, CYCLE)
        assert cycles_of(database, "demo") == [asked]  # a person's request counts, and one before it no longer does
        end_cycle(database, CYCLE, "refused", "worse", 30.0, trained={"x", "y", "z"}, suspect={"z"})
        assert not begin_cycle(database, CYCLE)
        found = cycles_of(database, "demo")[0]
        assert (found.end, found.reason, found.closed, found.config) == ("refused", "worse", 30.0, asked.config)
        assert trained_rows(database, "demo") == {"x", "y", "z"} and not trained_rows(database, "other")
        assert suspect_rows(database, "demo") == {"z": "a1"} and not suspect_rows(database, "other")
        assert admit_rows(database, "other") == 0 and admit_rows(database, "demo") == 1
        assert trained_rows(database, "demo") == {"x", "y"} and not suspect_rows(database, "demo")


def acts(*told: tuple[str, str | None]) -> list[Act]:
    return [
        Act(number, "a1", kind, float(number), outcome, float(number), "why", {"final": outcome == "final"})  # type: ignore[arg-type]
        for number, (kind, outcome) in enumerate(told)
    ]


@pytest.mark.parametrize(
    ("told", "times"),
    [
        ([("train", "done")], 0),
        ([("train", "failed"), ("train", "done")], 0),
        ([("train", "failed"), ("train", "paused")], 0),
        ([("snapshot", "failed"), ("train", "failed"), ("train", "failed")], 2),
        ([("train", "failed"), ("train", "interrupted"), ("train", None), ("train", "failed")], 2),
        ([("train", "interrupted")] * (KILLS_A_FAILURE - 1), 0),
        ([("train", None)] * KILLS_A_FAILURE, 1),
    ],
)
def test_failures_in_a_row(told: list[tuple[str, str | None]], times: int) -> None:
    found = last_failure(acts(*told), "a1")
    assert (found.times if found else 0) == times
    assert last_failure(acts(*told), "another") is None


def test_what_a_failure_tells() -> None:
    done = Act(1, None, "open", 5.0, "failed", 9.0, "the disk is full", {"patient": True})
    assert last_failure([done], None) == FailedAct("open", 1, 9.0, "the disk is full", patient=True)


def test_an_act_whose_process_died_is_settled_by_the_next_one(own_home: Path) -> None:
    with closing(open_database()) as database:
        begin_act(database, "demo", "a1", "train", 100.0)
        number = begin_act(database, "demo", "a1", "gate", 101.0)
        end_act(database, number, "done", 102.0, "deploy", {"hours": 1.5})
    assert [number for number, _ in settle_interrupted("demo")] == [1]
    assert settle_interrupted("demo") == []
    with closing(open_database()) as database:
        first, second = acts_of(database, "demo", "a1")
    assert (first.outcome, first.details) == ("interrupted", {"hours": 0.0})
    assert (second.outcome, second.details, second.ended) == ("done", {"hours": 1.5}, 102.0)


def test_failed_cycles_in_a_row() -> None:
    def closed(at: float, end: str) -> CycleRow:
        return CycleRow(str(at), "demo", at - 1, "rows", {}, "", None, at, end)  # type: ignore[arg-type]

    assert failed_in_a_row([]) == (0, 0.0)
    assert failed_in_a_row([closed(1, "failed"), closed(2, "promoted"), CYCLE]) == (0, 0.0)
    assert failed_in_a_row([closed(1, "promoted"), closed(2, "failed"), closed(3, "rolled_back")]) == (2, 3)


def test_a_look_is_at_the_champion_of_the_gate(own_home: Path) -> None:
    """A cycle was opened under champion 1 and judged after a person had promoted 2."""
    champion = Release("demo", 2, "", "", "", "", "", None, {}, 0.0, aliases=("champion",))
    with closing(open_database()) as database:
        for number, rivals in enumerate((["demo@1"], ["demo@2"], ["demo@2", "demo@1"], None)):
            cycle = replace(CYCLE, id=f"c{number}", champion="demo@1")
            begin_cycle(database, cycle)
            if rivals is not None:
                write_sealed(cycle.folder / GATE, {"schema": 1, "passed": False, "rivals": rivals})
            end_cycle(database, cycle, "refused", "worse", 20.0)
        assert looks_at(database, "demo", Rivals(champion)) == 2
        assert looks_at(database, "demo", Rivals()) == 0


@pytest.mark.parametrize(("station", "kind"), [("train", "close"), ("evaluate", "evaluate"), ("gate", "gate")])
def test_a_budget_that_training_used_up_holds_up_nothing_after_it(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, station: Station, kind: str
) -> None:
    data = {"path": "rows.jsonl"}
    config = parse_config({"model": "tiny", "data": data, "cycle": {"name": "demo", "hours": 8.0}}, "a test")
    with closing(open_database()) as database:
        begin_cycle(database, CYCLE)
        number = begin_act(database, "demo", CYCLE.id, "train", 100.0)
        end_act(database, number, "done", 102.0, "trained", {"hours": 7.999})
    done = frozenset(STATIONS[: STATIONS.index(station)])
    monkeypatch.setattr(
        hivetune.cycle.observe, "_artefacts", lambda *given: OpenCycle(CYCLE.id, done=done, spent_hours=given[-1][0])
    )
    observed = observe(config, "demo", LookCache(), 200.0)
    assert decide(observed, config.cycle, 200.0).kind == kind
