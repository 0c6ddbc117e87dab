"""The loop as users run it, with a tiny real model: three batches of rows, one of them poisoned, and real kills."""

import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
from cycle.replay import replayed
from cycle.small import NAME, KilledLoop, append_rows, make_config, make_rows, poisoned, summary

from hivetune.base.database import open_database
from hivetune.base.journal import read_journal
from hivetune.base.sealed import read_sealed
from hivetune.config import load_config
from hivetune.cycle.acts.run import replay_training
from hivetune.cycle.acts.slices import ActContext
from hivetune.cycle.decide import Observation, OpenCycle, Permission
from hivetune.cycle.ledger import REPLAY, cycles_of, read_replay
from hivetune.release.registry import releases
from hivetune.run.folder import adapter_hash

CLEAN, POISONED = 120, 60
TOLERANCE = 0.02  # of the gate, in nats per token
BATCHES = (make_rows(0, CLEAN), poisoned(make_rows(CLEAN, POISONED)), make_rows(CLEAN + POISONED, 60))
# Where the processes are killed, in each cycle once.
BORDERS = (
    [("intent", "open"), ("intent", "train"), ("outcome", "gate"), ("intent", "promote")],
    [("outcome", "train")],
    [("intent", "evaluate")],
)


def run_killed(config: Path, rows: Path, log: Path) -> KilledLoop:
    """Run all batches in order, with the kills of BORDERS."""
    killed = KilledLoop(config, log)
    for batch, borders in zip(BATCHES, BORDERS, strict=True):
        append_rows(rows, batch)
        killed.once(borders)
    return killed


def harm(run: Path) -> float:
    """Return how many nats per token a candidate is worse than the champion of its time, on clean held-out rows."""
    rows = read_sealed(run.parent / "against-champion.json")["rows"]
    clean = [row for row in rows if not CLEAN < int(row["source"].rpartition(":")[2]) <= CLEAN + POISONED]
    assert len(clean) >= 10
    return sum(row["tuned"] - row["base"] for row in clean) / sum(row["tokens"] for row in clean)


def check_three_cycles(journal: Path) -> None:
    """Check that nothing is lost or done twice, every row is accounted for, and no promotion is harmful."""
    found = summary()
    ends = [end for _, end, _ in found["cycles"]]
    assert ends[0] == "promoted" and len(ends) == 3 and set(ends) <= {"promoted", "refused"}
    assert [counts["rows_in"] for counts in found["rows"]] == [CLEAN, CLEAN + POISONED, CLEAN + POISONED + 60]
    with closing(open_database()) as database:
        for cycle in cycles_of(database, NAME)[1:]:
            assert cycle.end == "refused" or harm(cycle.run) < TOLERANCE
    champions = [label for label, *_, aliases in found["releases"] if "champion" in aliases]
    assert champions == [f"{NAME}@{ends.count('promoted')}"]
    done = Counter(entry["action"] for entry in read_journal(journal) if entry.get("outcome") == "done")
    assert done["train"] == done["gate"] == done["close"] == 3
    assert len(found["releases"]) == ends.count("promoted")
    # The kill at a promotion's intent may come when the alias has moved and its outcome is not written yet.
    assert done["promote"] in (len(found["releases"]) - 1, len(found["releases"]))
    assert len(replayed(journal)) > 20


def check_replay(config: Path) -> None:
    """Check that the training of the poisoned cycle, without its new rows, is the first champion's, bit for bit."""
    with closing(open_database()) as database:
        cycle = cycles_of(database, NAME)[1]
        first = releases(database, NAME)[0]
    observed = Observation(open=OpenCycle(cycle.id, passed=False))
    context = ActContext(load_config(config), NAME, observed, "a test", Permission, time.time())
    with patch.object(ActContext, "cycle", lambda _: cycle):
        words = replay_training(context)
    assert adapter_hash(cycle.folder / REPLAY) == first.adapter_sha256
    assert words == read_replay(cycle)["words"] and words.startswith("a training without them is")


@pytest.mark.slow
def test_three_cycles_one_poisoned_and_six_kills(own_home: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    killed = run_killed(config, tmp_path / "rows.jsonl", tmp_path / "log")
    assert len(killed.kills) == 6, killed.kills
    check_three_cycles(killed.journal)
    check_replay(config)
