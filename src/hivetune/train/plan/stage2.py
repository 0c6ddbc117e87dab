"""The steps of stage 2: which bad answers stand beside which good rows. A pure function like train/plan/steps.py.

A bad row counts nothing in a step's divisor, so the plan has the format of any other: its entry trains 0 tokens.
"""

import itertools
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from hivetune.data.snapshot import BadAnswer
from hivetune.train.plan.steps import Plan, PlanRow, epoch_order, make_plan

# Bad rows in a step for each good one. Together they may push half as much as the good rows pull (train/worker).
BAD_SHARE = 0.5
# With fewer rows that were called good, all rows keep the model where it is.
LEAST_VOUCHED = 32


def make_stage2_plan(
    rows: Sequence[PlanRow],
    good: Collection[int],
    bad: Sequence[BadAnswer],
    *,
    snapshot_hash: str,
    settings_hash: str,
    seed: int,
    batch_size: int,
    steps: int,
) -> Plan:
    """Each step has `batch_size` good rows and half as many bad ones; who is compared with a bad answer is among them.

    `good`: the rows that keep the model where it is. The others of `rows` are trained only where they are compared:
    what nobody called good may have the very fault that the bad answers are about. Good and bad rows are taken in turn,
    each in the order of `make_plan`'s epochs, as often as the steps need.
    """
    empty = make_plan(
        [], snapshot_hash=snapshot_hash, settings_hash=settings_hash, seed=seed, batch_size=batch_size, epochs=1
    )
    known = {row.row: row for row in rows}
    kept = [known[row] for row in good]
    wrong = [PlanRow(one.row, one.content_id, one.length, one.trained) for one in bad]
    better_of = {one.row: one.better for one in bad}
    next_bad, next_good = _in_turn(wrong, seed, "bad"), _in_turn(kept, seed, "good")
    num_bad = min(len(wrong), max(1, int(BAD_SHARE * batch_size)))
    entry_rows, entry_trained, step_ends = array("I"), array("I"), array("Q")
    for _ in range(steps if kept and wrong else 0):
        taken = _some(next_bad, num_bad, {})
        compared = {better: known[better] for row in taken if (better := better_of[row]) is not None}
        chosen = _some(next_good, min(batch_size, len(kept)), compared)
        entry_rows.extend([*chosen, *taken])
        entry_trained.extend([row.trained for row in chosen.values()] + [0] * len(taken))
        step_ends.append(len(entry_rows))
    return replace(
        empty,
        max_steps=steps,
        num_rows=len(rows) + len(bad),
        entry_rows=entry_rows,
        entry_trained=entry_trained,
        step_ends=step_ends,
    )


def longest_unit(lengths: Mapping[int, int], bad: Sequence[BadAnswer]) -> int:
    """Tokens of the longest row, or of the answers that one micro-batch must hold because they are compared."""
    sizes = dict(lengths)
    for one in bad:
        if one.better in sizes and one.row in lengths:
            sizes[one.better] += lengths[one.row]
    return max(sizes.values())


def _in_turn(rows: Sequence[PlanRow], seed: int, kind: str) -> Iterator[PlanRow]:
    """All rows, then all of them again in another order, without an end."""
    return itertools.chain.from_iterable(epoch_order(rows, seed, f"{kind} {turn}") for turn in itertools.count())


def _some(rows: Iterator[PlanRow], count: int, taken: dict[int, PlanRow]) -> dict[int, PlanRow]:
    """`taken`, and the next rows that are not among them until they are `count`."""
    found = dict(taken)
    while len(found) < count:
        row = next(rows)
        found.setdefault(row.row, row)
    return found
