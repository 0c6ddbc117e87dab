"""Law 1 for a run: every row of the input in one place, also rows that are trained in several views."""

from types import SimpleNamespace

from hivetune.train.plan.steps import Amendment, PlanRow, make_plan
from hivetune.train.start import account

# Views 0, 1 and 2 are of one row, 3 and 4 of another, 5 is a row by itself.
FIRST = {1: 0, 2: 0, 4: 3}
TAKEN_IN = {"rows_in": 6, "trained": 3, "held_out": 1, "duplicates": 1, "rejected": {"bad-json": 1}, "set_aside": {}}


def a_run(*amendments: Amendment) -> SimpleNamespace:
    plan = make_plan(
        [PlanRow(row, str(FIRST.get(row, row)), 10, 5) for row in range(6)],
        snapshot_hash="s",
        settings_hash="t",
        seed=0,
        batch_size=1,
        epochs=1,
    ).amended(*amendments)
    snapshot = SimpleNamespace(manifest={"accounting": TAKEN_IN}, first_views=lambda: FIRST, bad_rows=lambda: ())
    return SimpleNamespace(plan=plan, snapshot=snapshot)


def test_views_of_one_row_count_once() -> None:
    for steps_done in range(7):
        counts = account(a_run(), steps_done)  # type: ignore[arg-type]
        assert counts.missing == 0
    assert (counts.trained, counts.not_reached) == (3, 0)
    assert account(a_run(), 0).not_reached == 3  # type: ignore[arg-type]


def test_a_row_with_a_quarantined_view_is_quarantined() -> None:
    counts = account(a_run(Amendment(0, (4,), "not finite")), 6)  # type: ignore[arg-type]
    assert (counts.trained, counts.quarantined, counts.missing) == (2, 1, 0)
