"""Rows that are left out by name: set aside with their reason, and the splits of all others stay as they were."""

from collections.abc import Callable
from pathlib import Path

from hivetune.base.disk import read_json
from hivetune.config import DataConfig, RunConfig
from hivetune.data.prepare.prepare import prepare
from hivetune.data.reasons import LEAVE_OUT
from hivetune.data.snapshot import REPORT


def rows(count: int) -> list[dict[str, object]]:
    return [
        {"prompt": f"question {n} about topic {n * 7919}", "completion": f"answer {n} of {n * 104729}"}
        for n in range(count)
    ]


def config(path: Path) -> RunConfig:
    return RunConfig(model="tiny", data=DataConfig(path=str(path)))


def test_named_rows_are_set_aside_and_all_others_stay(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows(rows(60))
    whole = {row.id: row for row in prepare(config(path), chatml).pool()}
    named = {identity: [*LEAVE_OUT][n % len(LEAVE_OUT)] for n, identity in enumerate(sorted(whole)[:20])}
    snapshot = prepare(config(path), chatml, leave_out=named | {"of another day": "not-drawn"})
    assert {row.id: row.split for row in snapshot.pool()} == {
        identity: row.split for identity, row in whole.items() if identity not in named
    }
    accounting = snapshot.manifest["accounting"]
    assert accounting["set_aside"] == {reason: list(named.values()).count(reason) for reason in LEAVE_OUT}
    assert accounting["rows_in"] == 60 == accounting["trained"] + accounting["held_out"] + 20
    told = [one for one in read_json(snapshot.folder / REPORT)["problems"] if one["reason"] in LEAVE_OUT]
    assert {one["reason"]: one["rows"] for one in told} == accounting["set_aside"]


def test_another_choice_is_another_snapshot_and_the_same_one_is_found(
    write_rows: Callable[..., Path], chatml: Path
) -> None:
    path = write_rows(rows(30))
    whole = prepare(config(path), chatml)
    left = dict.fromkeys([row.id for row in whole.pool()][:2], "not-drawn")
    one, other = (prepare(config(path), chatml, leave_out=dict(each)) for each in (left.items(), [*left.items()][::-1]))
    assert one.folder == other.folder
    assert prepare(config(path), chatml, leave_out={}).hash == whole.hash != one.hash


def test_the_pool_knows_groups_and_whose_answers_they_are(write_rows: Callable[..., Path], chatml: Path) -> None:
    given = rows(60)
    for number, row in enumerate(given):
        row |= {"session_id": f"s{number // 3}", "user_id": "ada"}
    given[0] |= {"answered_by": "helpdesk@3", "feedback": 1}
    pool = list(prepare(config(write_rows(given)), chatml).pool())
    assert len({row.group_id for row in pool}) == 20
    assert [row.answered_by for row in pool].count("helpdesk@3") == 1
    assert {row.user for row in pool} == {"ada"}
    assert all(row.length > row.trained > 0 and len(row.numbers) == 1 for row in pool)
