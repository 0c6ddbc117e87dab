"""Whole runs of the real training loop on a small random model, in this process: rows that can be learnt."""

import json
import random
import sqlite3
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hivetune.base.disk import sha256_bytes, write_manifest
from hivetune.base.journal import read_journal
from hivetune.config import parse_config
from hivetune.data.snapshot import ROWS_SCHEMA
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Train
from hivetune.train.plan.steps import PlanRow, make_plan, write_plan
from hivetune.train.worker import loop as train

SPLITS = ("train",) * 8 + ("validation", "test")


def learnable_rows(count: int, *, seed: int = 0, vocab: int = 90) -> list[tuple[list[int], list[int]]]:
    """Rows whose second half continues the first by a rule (+1), so that a loss can fall. (tokens, trained)."""
    numbers = random.Random(seed)
    rows = []
    for _ in range(count):
        start, size = numbers.randrange(3, 40), numbers.randrange(8, 20)
        tokens = [3 + (start + i) % (vocab - 3) for i in range(size)]
        rows.append((tokens, [0] * (size // 2) + [1] * (size - size // 2)))
    return rows


def write_snapshot(folder: Path, rows: Sequence[tuple[list[int], list[int]]], splits: Sequence[str] = SPLITS) -> str:
    """A snapshot folder with these rows, its splits in turn; its hash."""
    folder.mkdir(parents=True)
    offsets, tokens, trained = array("Q", [0]), array("I"), bytearray()
    database = sqlite3.connect(folder / "rows.sqlite")
    database.executescript(ROWS_SCHEMA)
    for row, (ids, mask) in enumerate(rows):
        offsets.append(offsets[-1] + len(ids))
        tokens.extend(ids)
        trained += bytes(mask)
        database.execute(
            "INSERT INTO rows (row, id, source, split, tied, length, trained, messages)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, '[]')",
            (row, str(row), f"rows.jsonl:{row + 1}", splits[row % len(splits)], row, len(ids), sum(mask)),
        )
    database.commit()
    database.close()
    (folder / "offsets.u64").write_bytes(offsets.tobytes())
    (folder / "tokens.u32").write_bytes(tokens.tobytes())
    (folder / "trained.u8").write_bytes(trained)
    digest = sha256_bytes(tokens.tobytes() + bytes(trained))
    write_manifest(folder, {"kind": "snapshot", "hash": digest, "num_rows": len(rows), "num_bad": 0})
    return digest


# The comparison with transformers has tests of its own, and takes longer than most runs here.
FIXED = {"threads": 1, "products": "native", "agreement": {}}


def make_run(
    folder: Path,
    rows: Sequence[tuple[list[int], list[int]]],
    *,
    choices: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """`folder/run` with config and plan and `folder/snapshot`: everything but the model."""
    defaults: dict[str, Any] = {
        "model": "tiny",
        "data": {"path": "none"},
        "lora": {"r": 4, "alpha": 8},
        "batch_size": 8,
        "epochs": 2,
        "learning_rate": 1e-2,
        "dtype": "float32",
        "device": "cpu",
    }
    config = parse_config({**defaults, **settings})
    digest = write_snapshot(folder / "snapshot", rows)
    run = folder / "run"
    run.mkdir()
    resolved = {"config": config.model_dump(mode="json"), "choices": FIXED | dict(choices or {})}
    (run / "config.resolved.yaml").write_text(yaml.safe_dump(resolved))
    plan_rows = [
        PlanRow(row, str(row), len(ids), sum(mask))
        for row, (ids, mask) in enumerate(rows)
        if SPLITS[row % len(SPLITS)] == "train"
    ]
    plan = make_plan(
        plan_rows,
        snapshot_hash=digest,
        settings_hash="settings",
        seed=config.seed,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    write_plan(run, plan)


def run_training(folder: Path, model: Path, *, on_beat: Callable[[Heartbeat, int], None] | None = None) -> dict:
    """The training task of `folder/run`; `on_beat(heartbeat, steps so far)` after each step of this call."""
    heartbeat = Heartbeat(None)
    if on_beat is not None:
        steps = 0

        def beat(beat: Beat) -> None:
            nonlocal steps
            steps += beat is Beat.ITEM
            on_beat(heartbeat, steps)

        heartbeat.beat = beat  # type: ignore[method-assign]
    run = folder / "run"
    return train.main(Train(run, model, folder / "snapshot"), heartbeat)


def stop_after(steps: int) -> Callable[[Heartbeat, int], None]:
    """Ask for a stop as SIGTERM does, once `steps` steps are done."""

    def on_beat(heartbeat: Heartbeat, done: int) -> None:
        heartbeat.stop_requested = heartbeat.stop_requested or done >= steps

    return on_beat


def losses(folder: Path, event: str = "step") -> list[float]:
    return [entry["loss"] for entry in read_journal(folder / "run/metrics.jsonl") if entry["event"] == event]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Steps and validations without what a clock says."""
    entries = [e for e in read_journal(folder / "run/metrics.jsonl") if e["event"] in ("step", "validation")]
    return [{key: value for key, value in entry.items() if key not in ("time", "seconds")} for entry in entries]


def run_bytes(folder: Path) -> dict[str, bytes]:
    """Everything that two runs of one plan must agree on."""
    run = folder / "run"
    newest = max(path for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    files = [run / "adapter_model.safetensors", run / "adapter_config.json", *sorted(newest.iterdir())]
    return {str(path.relative_to(run)): path.read_bytes() for path in files} | {
        "metrics": json.dumps(metrics(folder)).encode()
    }
