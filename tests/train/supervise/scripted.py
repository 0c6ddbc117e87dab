"""Run folders for the scripted worker: a plan, a snapshot of plain numbers, a prepared model that is none."""

import hashlib
import json
import os
import sqlite3
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_manifest
from hivetune.config import RunConfig, parse_config
from hivetune.data.snapshot import ROWS_SCHEMA
from hivetune.machine.inventory import Card, Machine
from hivetune.process.launch import VARIABLE
from hivetune.train.plan.steps import PlanRow, make_plan, write_plan
from hivetune.train.supervise.supervisor import RunOutcome, supervise_run

WORKER = str(Path(__file__).with_name("scripted_worker.py"))
NUM_ROWS, BATCH = 96, 4
HANGS = ("freeze", "hold the GIL")
# Silence of so many seconds is a hang: at once where the script hangs, never where it doesn't and the disk does. A
# replayed row that hangs does so before its child's first item, so it ends with the time for the start.
SILENCES_S = {True: {"hang_floor_s": 0.6, "start_timeout_s": 8}, False: {"hang_floor_s": 60, "start_timeout_s": 20}}
QUICK = {"save_timeout_s": 20, "evaluate_timeout_s": 20, "backoff_s": 0.05}
HOST = Machine("test", ("avx2",), 2, 8 << 30, 4 << 30, "machine", 1 << 40, (), {"torch": "2.7"})
CARD = Machine(
    "test", ("avx2",), 2, 8 << 30, 4 << 30, "machine", 1 << 40, (Card("rocm", 0, "R9700", 32 << 30, 30 << 30, "6.18"),)
)


def make_run(
    folder: Path, faults: list[dict[str, Any]], *, device: str = "cpu", allow: Sequence[str] = (), **limits: Any
) -> RunConfig:
    """`folder/run`, `folder/model` and `folder/snapshot`, ready for `supervise`; `limits` of the test."""
    run = folder / "run"
    run.mkdir(parents=True)
    silences = SILENCES_S[any(fault["do"] in HANGS for fault in faults if "do" in fault)]
    os.environ[VARIABLE] = json.dumps({**QUICK, **silences, **limits})
    config = parse_config(
        {
            "model": "none",
            "data": {"path": "none"},
            "batch_size": BATCH,
            "epochs": 1,
            "allow": list(allow),
        }
    )
    (run / "config.resolved.yaml").write_text(
        json.dumps({"config": config.model_dump(mode="json"), "choices": {"device": device}})
    )
    (run / "script.json").write_text(json.dumps(faults))
    (folder / "model").mkdir()
    (folder / "model/hivetune.json").write_text("{}")
    write_manifest(folder / "model")
    digest = _write_snapshot(folder / "snapshot")
    rows = [PlanRow(row, _content_id(row), _length(row), 3) for row in range(NUM_ROWS)]
    plan = make_plan(rows, snapshot_hash=digest, settings_hash="s", seed=1, batch_size=BATCH, epochs=1)
    write_plan(run, plan)
    return config


def supervise(folder: Path, config: RunConfig, machine: Machine = HOST, **more: Any) -> RunOutcome:
    return supervise_run(
        folder / "run",
        config,
        model=folder / "model",
        snapshot=folder / "snapshot",
        worker=WORKER,
        replay=WORKER,
        machine=machine,
        **more,
    )


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run/events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == kind]


def _content_id(row: int) -> str:
    return hashlib.sha256(str(row).encode()).hexdigest()


def _length(row: int) -> int:
    return 10 + row % 7


def _write_snapshot(folder: Path) -> str:
    folder.mkdir()
    offsets = array("Q", [0])
    for row in range(NUM_ROWS):
        offsets.append(offsets[-1] + _length(row))
    (folder / "offsets.u64").write_bytes(offsets.tobytes())
    (folder / "tokens.u32").write_bytes(array("I", range(offsets[-1])).tobytes())
    (folder / "trained.u8").write_bytes(bytes([0, 1] * (offsets[-1] // 2 + 1))[: offsets[-1]])
    with sqlite3.connect(folder / "rows.sqlite") as database:
        database.executescript(ROWS_SCHEMA)
        for row in range(NUM_ROWS):
            database.execute(
                "INSERT INTO rows (row, id, source, split, tied, length, trained, messages)"
                " VALUES (?, ?, ?, 'train', ?, ?, 3, '[]')",
                (row, _content_id(row), f"rows.jsonl:{row + 1}", row, _length(row)),
            )
    database.close()
    write_manifest(folder, {"kind": "snapshot", "hash": "h", "num_rows": NUM_ROWS, "num_bad": 0})
    return "h"
