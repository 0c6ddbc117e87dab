"""The memory of the cycle: cycles that open once, failures and deaths of a station, rollbacks that are told once."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hivetune.base.database import open_database, transaction
from hivetune.cycle.record import (
    DEATHS_A_FAILURE,
    CycleRow,
    begin_cycle,
    begin_station,
    cycles_of,
    end_cycle,
    end_station,
    fail_station,
    failed_in_a_row,
    newly_rolled_back,
    trained_rows,
)

CYCLE = CycleRow("a1", "demo", 10.0, "rows", {"model": "tiny"}, "/pool", None)


def test_the_same_cycle_is_opened_once_and_again_only_after_a_failure(own_home: Path) -> None:
    with closing(open_database()) as database:
        begin_cycle(database, CYCLE)
        begin_cycle(database, replace(CYCLE, opened=11.0))
        end_cycle(database, CYCLE, "failed", "no disk", 20.0)
        asked = replace(CYCLE, opened=25.0, opened_for="request", config={"model": "tiny", "budget": 9})
        begin_cycle(database, asked)
        begin_cycle(database, CYCLE)
        assert cycles_of(database, "demo") == [asked]  # a person's request counts, and one before it no longer does
        end_cycle(database, CYCLE, "refused", "worse", 30.0, trained={"x", "y"})
        begin_cycle(database, replace(CYCLE, opened=40.0))
        found = cycles_of(database, "demo")[0]
        assert (found.end, found.reason, found.closed, found.config) == ("refused", "worse", 30.0, asked.config)
        assert trained_rows(database, "demo") == {"x", "y"} and not trained_rows(database, "other")


def test_failures_count_by_station_and_a_wait_for_a_disk_does_not(own_home: Path) -> None:
    with closing(open_database()) as database:
        begin_cycle(database, CYCLE)
        for counts, failures in ((True, 1), (False, 1), (True, 2)):
            begin_station(database, CYCLE, "train", 5.0)
            assert fail_station(database, CYCLE, "why", 6.0, counts=counts) == failures
        found = cycles_of(database, "demo")[0]
        assert (found.station, found.failures, found.failed_at, found.words) == ("train", 2, 6.0, "why")
        begin_station(database, CYCLE, "evaluate", 7.0)
        assert cycles_of(database, "demo")[0].failures == 0


def test_a_station_that_kills_its_process_each_time_fails(own_home: Path) -> None:
    with closing(open_database()) as database:
        begin_cycle(database, CYCLE)
        for deaths in range(DEATHS_A_FAILURE):
            assert begin_station(database, CYCLE, "train", 5.0) == deaths
            assert cycles_of(database, "demo")[0].failures == 0
        begin_station(database, CYCLE, "train", 5.0)
        assert cycles_of(database, "demo")[0].failures == 1
        for _ in range(3 * DEATHS_A_FAILURE):  # slices that end with the window are no deaths
            begin_station(database, CYCLE, "train", 5.0)
            end_station(database, CYCLE)
        assert cycles_of(database, "demo")[0].failures == 1


def test_failed_cycles_in_a_row() -> None:
    def closed(at: float, end: str) -> CycleRow:
        return replace(CYCLE, id=str(at), opened=at - 1, closed=at, end=end)  # type: ignore[arg-type]

    assert failed_in_a_row([]) == (0, 0.0)
    assert failed_in_a_row([closed(1, "failed"), closed(2, "promoted"), CYCLE]) == (0, 0.0)
    assert failed_in_a_row([closed(1, "promoted"), closed(2, "failed"), closed(3, "rolled_back")]) == (2, 3)


@pytest.mark.parametrize("withdrawn", ["too many complaints", ""])
def test_a_rollback_is_found_once_whoever_made_it(own_home: Path, withdrawn: str) -> None:
    with closing(open_database()) as database:
        begin_cycle(database, CYCLE)
        end_cycle(database, CYCLE, "promoted", "better", 20.0)
        with transaction(database):
            database.execute(
                "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, proof,"
                " created, withdrawn) VALUES ('demo', 3, ?, '', '', '', '', '{}', 0, ?)",
                (str(CYCLE.run), withdrawn),
            )
        found = [(release.label, reason) for release, reason in newly_rolled_back(database, "demo")]
        assert found == ([("demo@3", withdrawn)] if withdrawn else [])
        assert newly_rolled_back(database, "demo") == []
        assert cycles_of(database, "demo")[0].end == ("rolled_back" if withdrawn else "promoted")
