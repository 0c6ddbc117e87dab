"""Run folders for the scripted worker: a plan, a snapshot of plain numbers, a prepared model that is none."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.planned import write_run

from hivetune.base.disk import write_manifest
from hivetune.config import RunConfig
from hivetune.machine.inventory import Card, Machine
from hivetune.process.launch import VARIABLE
from hivetune.train.supervise.supervisor import RunOutcome, supervise_run

WORKER = str(Path(__file__).with_name("scripted_worker.py"))
NUM_ROWS, BATCH = 96, 4
HANGS = ("freeze", "hold the GIL")
PACE = {"pace_s": 0.02}
# In the words of real cards.
GPU_FAULT = "Memory access fault by GPU node-1 (Agent handle: 0x1) on address 0x7f. Reason: Page not present."
BLAS = "CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasLtMatmul` with m 8 n 412 k 896"
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
    silences = SILENCES_S[any(fault["do"] in HANGS for fault in faults if "do" in fault)]
    os.environ[VARIABLE] = json.dumps({**QUICK, **silences, **limits})
    rows = [(list(range(size)), [0] * (size - 3) + [1] * 3) for size in (10 + row % 7 for row in range(NUM_ROWS))]
    settings = {
        "model": "none",
        "batch_size": BATCH,
        "allow": list(allow),
        "lora": {},
        "dtype": "auto",
        "device": "auto",
    }
    config = write_run(folder, rows, settings, {"device": device})
    (folder / "run/script.json").write_text(json.dumps(faults))
    (folder / "model").mkdir()
    (folder / "model/hivetune.json").write_text("{}")
    write_manifest(folder / "model")
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


def steps(folder: Path) -> int:
    """The steps that a run has made so far."""
    path = folder / "run/metrics.jsonl"
    return path.read_text().count('"event": "step"') if path.exists() else 0
