"""Run folders as training finds them: a config, a plan, and a snapshot of given rows of tokens."""

import json
import sqlite3
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import sha256_bytes, write_manifest
from hivetune.config import RunConfig, parse_config
from hivetune.data.snapshot import ROWS_SCHEMA, open_snapshot
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import Profile, write_profile
from hivetune.run.choices import Choices
from hivetune.train.open import plan_of
from hivetune.train.plan.steps import write_plan

Rows = Sequence[tuple[list[int], list[int]]]  # tokens, and which of them are trained
DEFAULTS: dict[str, Any] = {
    "model": "tiny",
    "data": {"path": "none"},
    "lora": {"r": 4},
    "epochs": 1,
    "learning_rate": 1e-3,
    "dtype": "float32",
    "device": "cpu",
}


def write_snapshot(folder: Path, rows: Rows, splits: Sequence[str] = ("train",)) -> str:
    """Write a snapshot folder with these rows, its splits in turn; return its hash."""
    folder.mkdir(parents=True)
    offsets, tokens, trained = array("Q", [0]), array("I"), bytearray()
    database = sqlite3.connect(folder / "rows.sqlite")
    database.executescript(ROWS_SCHEMA)
    for row, (ids, mask) in enumerate(rows):
        offsets.append(offsets[-1] + len(ids))
        tokens.extend(ids)
        trained += bytes(mask)
        database.execute(
            "INSERT INTO rows (row, id, source, split, group_id, length, trained, messages)"
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


def write_run(
    folder: Path,
    rows: Rows,
    settings: Mapping[str, Any],
    choices: Mapping[str, Any],
    splits: Sequence[str] = ("train",),
) -> RunConfig:
    """Write `folder/run` and `folder/snapshot`, and return the config: DEFAULTS with `settings`."""
    config = parse_config({**DEFAULTS, **settings})
    write_snapshot(folder / "snapshot", rows, splits)
    run = folder / "run"
    run.mkdir()
    resolved = {"config": config.model_dump(mode="json"), "choices": dict(choices)}
    (run / "config.resolved.yaml").write_text(json.dumps(resolved))
    write_plan(run, plan_of(config, open_snapshot(folder / "snapshot"), "settings"))
    return config


def vouch(model: Path, dtype: str = "auto") -> None:
    """Note that the fast path computes what transformers does with this prepared model. The comparison has tests of
    its own, and takes 5 s."""
    from hivetune.train.worker.settle import _conditions, complete  # here: it brings torch, which not all tests need

    key = _conditions(model, complete("cpu", dtype, Choices()))
    write_profile(Profile(read_machine().fingerprint, agreements={key: {"key": key}}))
