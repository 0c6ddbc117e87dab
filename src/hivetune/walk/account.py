"""Law 1 for a run: what became of each row that came in."""

from hivetune.records import Accounting
from hivetune.walk.open import Run


def account(run: Run, steps_done: int) -> Accounting:
    """Law 1 for a run: the snapshot's accounting with its training rows divided by what became of them."""
    counts = run.plan.count_rows(steps_done)
    taken_in = run.snapshot.manifest["accounting"]
    return Accounting(
        rows_in=taken_in["rows_in"],
        trained=counts.trained,
        held_out=len(run.snapshot.rows("validation")) + len(run.snapshot.rows("test")),
        duplicates=taken_in["duplicates"],
        rejected=taken_in["rejected"],
        set_aside=taken_in["set_aside"],
        quarantined=counts.quarantined,
        not_reached=counts.not_reached,
    )


def quarantined_rows(run: Run) -> list[str]:
    """`file:line: reason` of each row that was taken out at run time."""
    return [
        f"{run.snapshot.info(row).source}: {amendment.reason}"
        for amendment in run.plan.amendments
        if amendment.until_step is None
        for row in amendment.rows
    ]
