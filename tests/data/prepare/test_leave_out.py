"""Rows that are left out by name: set aside with their reason, and the splits of all others stay as they were."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hivetune.base.disk import read_json
from hivetune.config import DataConfig, RunConfig
from hivetune.data.prepare.prepare import prepare
from hivetune.data.reasons import LEAVE_OUT, read_leave_out, write_leave_out
from hivetune.data.snapshot import REPORT
from hivetune.errors import UsageError


def rows(count: int) -> list[dict[str, object]]:
    return [
        {"prompt": f"question {n} about topic {n * 7919}", "completion": f"answer {n} of {n * 104729}"}
        for n in range(count)
    ]


def config(path: Path, leave_out: Path | None = None, **data: object) -> RunConfig:
    named = None if leave_out is None else str(leave_out)
    return RunConfig(model="tiny", data=DataConfig(path=str(path), leave_out=named, **data))


def test_named_rows_are_set_aside_and_all_others_stay(
    write_rows: Callable[..., Path], chatml: Path, tmp_path: Path
) -> None:
    path = write_rows(rows(60))
    whole = {row.id: row for row in prepare(config(path), chatml).pool()}
    named = {identity: [*LEAVE_OUT][n % len(LEAVE_OUT)] for n, identity in enumerate(sorted(whole)[:20])}
    write_leave_out(tmp_path / "left.jsonl", named | {"of another day": "not-drawn"})
    snapshot = prepare(config(path, tmp_path / "left.jsonl"), chatml)
    assert {row.id: row.split for row in snapshot.pool()} == {
        identity: row.split for identity, row in whole.items() if identity not in named
    }
    accounting = snapshot.manifest["accounting"]
    assert accounting["set_aside"] == {reason: list(named.values()).count(reason) for reason in LEAVE_OUT}
    assert accounting["rows_in"] == 60 == accounting["trained"] + accounting["held_out"] + 20
    told = [one for one in read_json(snapshot.folder / REPORT)["problems"] if one["reason"] in LEAVE_OUT]
    assert {one["reason"]: one["rows"] for one in told} == accounting["set_aside"]


def test_another_choice_is_another_snapshot_and_the_same_one_is_found(
    write_rows: Callable[..., Path], chatml: Path, tmp_path: Path
) -> None:
    """By what the file says, not by where it lies."""
    path = write_rows(rows(30))
    identity = next(iter(prepare(config(path), chatml).pool())).id
    for name in ("one", "other"):
        write_leave_out(tmp_path / name, {identity: "not-drawn"})
    one, other = (prepare(config(path, tmp_path / name), chatml) for name in ("one", "other"))
    assert one.folder == other.folder
    write_leave_out(tmp_path / "none", {})
    assert prepare(config(path, tmp_path / "none"), chatml).hash == prepare(config(path), chatml).hash != one.hash


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


@pytest.mark.parametrize(
    "line", ["{", '{"id": "a"}', '{"id": "a", "reason": "of mine"}', "[]", '{"id": "a", "reason": []}']
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "left.jsonl"
    path.write_text(json.dumps({"id": "a", "reason": "own-answer"}) + "\n" + line + "\n")
    with pytest.raises(UsageError, match=r"left\.jsonl:2"):
        read_leave_out(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.leave_out: .*missing"):
        read_leave_out(tmp_path / "missing")
