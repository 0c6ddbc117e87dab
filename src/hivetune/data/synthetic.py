"""Rows that a maker made (`data synth`), beside rows that people had: their number, and the share they may have."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hivetune.data.fates import SYNTHETIC_SHARE, TRAIN, Decisions, open_result


def maker_of(row: Mapping[str, Any]) -> str | None:
    """Who made a row, by its `synth`; None for a row that people had."""
    made = row.get("synth")
    return str(made.get("maker") or "unknown") if isinstance(made, dict) else None


def cap_synthetic(results: Sequence[Path], decisions: Decisions, order: Sequence[int], share: float) -> None:
    """Set aside what is more than `share` of the usable rows, where there are others; which ones, their content draws.

    Without any other row nothing is set aside: there is nothing that they could drown.
    """
    made = []
    for start, path in zip(decisions.chunk_starts, results, strict=True):
        with closing(open_result(path)) as database:
            rows = (start + n for (n,) in database.execute("SELECT n FROM rows WHERE maker IS NOT NULL"))
            made += [row for row in rows if decisions.fate[row] == TRAIN]
    others = decisions.count(TRAIN) - len(made)
    most = len(made) if not others or share >= 1 else min(len(made), int(others * share / (1 - share) + 1e-9))
    for row in sorted(made, key=order.__getitem__)[most:]:
        decisions.fate[row] = SYNTHETIC_SHARE
    decisions.synthetic = {"rows": most, "others": others}
