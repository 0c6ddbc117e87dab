"""Law 1 for a run: what became of each row that came in."""

from hivetune.records import Accounting
from hivetune.walk.open import Run


def account(run: Run, steps_done: int) -> Accounting:
    """Law 1 for a run: the snapshot's accounting with its training rows divided by what became of them.

    A row of several views is quarantined when one of them is, else trained when one of them was.
    """
    taken_in = run.snapshot.manifest["accounting"]
    first = run.snapshot.first_views()
    trained, quarantined = ({first.get(row, row) for row in rows} for rows in run.plan.rows_reached(steps_done))
    trained -= quarantined
    return Accounting(
        rows_in=taken_in["rows_in"],
        trained=len(trained),
        held_out=taken_in["held_out"],
        duplicates=taken_in["duplicates"],
        rejected=taken_in["rejected"],
        set_aside=taken_in["set_aside"],
        quarantined=len(quarantined),
        not_reached=taken_in["trained"] - len(trained) - len(quarantined),
    )


def quarantined_rows(run: Run) -> list[str]:
    """`file:line: reason` of each row that was taken out at run time."""
    return [
        f"{run.snapshot.info(row).source}: {amendment.reason}"
        for amendment in run.plan.amendments
        if amendment.until_step is None
        for row in amendment.rows
    ]
