"""Runs for the tests of reports: a run folder without training, and its journal read independently."""

import json
import struct
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import write_atomic, write_json
from hivetune.base.journal import Journal
from hivetune.config import parse_config
from hivetune.run.choices import Choices
from hivetune.run.folder import write_resolved

Points = dict[tuple[str, int], float]


def make_run(folder: Path, name: str = "mine-abc") -> Path:
    run = folder / name
    run.mkdir(parents=True)
    write_json(run / "run.json", {"schema": 1, "name": "mine", "created": 1_700_000_000.25, "status": "new"})
    write_json(run / "plan.json", {"schema": 1, "steps": 1000})
    config = parse_config({"model": "smollm2-135m", "data": {"path": "rows.jsonl"}})
    write_resolved(run, config, Choices(device="cpu", dtype="float32"))
    with Journal(run / "events.jsonl") as events:
        events.append("supervisor_started")
        events.append("supervisor_ended", status="done", steps=0, restarts=0, why="")
    with open_database() as database:
        database.execute("INSERT INTO runs VALUES (?, 'mine', 5.0, 'h')", (str(run),))
    return run


def make_steps(run: Path, first: int, last: int, *, shift: float = 0.0, validate_every: int = 10) -> None:
    """Write steps `first` to `last` as a worker does."""
    with Journal(run / "metrics.jsonl") as metrics:
        metrics.append("started", step=first - 1, path="fast", pid=1)
        for step in range(first, last + 1):
            known = {"grad_norm": 1.0 + step / 7, "lr": 1e-4, "tokens": 320, "trained_tokens": 100, "rows": 8}
            metrics.append("step", step=step, loss=3.0 - step / 900 + shift, seconds=0.25, **known)
            if step % validate_every == 0:
                metrics.append("validation", step=step, loss=2.5 - step / 900 + shift, tokens=90, seconds=1.0)


def take_back(run: Path, step: int) -> None:
    """Remove later steps in one rename, as a worker does that resumes at `step` (train/worker/session.py)."""
    path = run / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line).get("step", 0) <= step]
    write_atomic(path, "".join(kept).encode())


def points_in(run: Path, field: str = "loss") -> Points:
    """Return the points of the journal, read without the code under test. Each step is in it once."""
    found: Points = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] in ("step", "validation") and field in entry:
            key = (entry["event"], entry["step"])
            assert key not in found
            found[key] = entry[field]
    return found


def float32(points: Points) -> Points:
    """Return the values as an event file holds them."""
    return {key: struct.unpack("<f", struct.pack("<f", value))[0] for key, value in points.items()}
