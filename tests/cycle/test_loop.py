"""The loop as users run it, with a tiny real model: three batches of rows, one of them poisoned, and real kills."""

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from cycle.small import NAME, KilledLoop, append_rows, make_config, make_rows, poisoned, summary

from hivetune.base.database import open_database
from hivetune.base.documents import read_document
from hivetune.base.journal import read_journal
from hivetune.cycle.record import cycles_of

CLEAN, POISONED = 120, 60
TOLERANCE = 0.02  # of the gate, in nats per token
BATCHES = (make_rows(0, CLEAN), poisoned(make_rows(CLEAN, POISONED)), make_rows(CLEAN + POISONED, 60))
# Where the processes are killed, in each cycle once.
BORDERS = (
    [("opened", ""), ("begin", "rows"), ("begin", "train"), ("end", "judge"), ("begin", "promote")],
    [("end", "train"), ("begin", "judge")],
    [("begin", "evaluate")],
)


def harm(run: Path) -> float:
    """Return how many nats per token a candidate is worse than the champion of its time, on clean held-out rows."""
    rows = read_document(run.parent / "against-champion.json")["rows"]
    clean = [row for row in rows if not CLEAN < int(row["source"].rpartition(":")[2]) <= CLEAN + POISONED]
    assert len(clean) >= 10
    return sum(row["tuned"] - row["base"] for row in clean) / sum(row["tokens"] for row in clean)


@pytest.mark.slow
def test_three_cycles_one_poisoned_and_eight_kills(own_home: Path, tmp_path: Path) -> None:
    """Nothing is lost or done twice, every row is accounted for, and no promotion is harmful."""
    config = make_config(tmp_path)
    killed = KilledLoop(config, tmp_path / "log")
    for batch, borders in zip(BATCHES, BORDERS, strict=True):
        append_rows(tmp_path / "rows.jsonl", batch)
        killed.once(borders)
    assert len(killed.kills) == 8, killed.kills
    found = summary()
    ends = [end for _, end, _ in found["cycles"]]
    assert ends[0] == "promoted" and len(ends) == 3 and set(ends) <= {"promoted", "refused"}
    assert [counts["rows_in"] for counts in found["rows"]] == [CLEAN, CLEAN + POISONED, CLEAN + POISONED + 60]
    with closing(open_database()) as database:
        for cycle in cycles_of(database, NAME)[1:]:
            assert cycle.end == "refused" or harm(cycle.run) < TOLERANCE
            assert cycle.end != "refused" or "new since demo@1: 60 of " in cycle.reason
    champions = [label for label, *_, aliases in found["releases"] if "champion" in aliases]
    assert champions == [f"{NAME}@{ends.count('promoted')}"]
    assert len(found["releases"]) == ends.count("promoted")
    done = Counter(entry["station"] for entry in read_journal(killed.journal) if entry.get("outcome") == "done")
    assert done["train"] == done["judge"] == done["evaluate"] == 3
    # The kill at a promotion's begin may come when the alias has moved and its end is not written yet.
    assert done["promote"] in (len(found["releases"]) - 1, len(found["releases"]))
