"""Runs of the real worker on a small random model: rows of random tokens, some of them poisoned.

A row with the token NAN has a loss that is not finite (its embedding is NaN). A row with the token KILL ends the
process of whoever computes it, if that is `spoiled_worker.py`.
"""

import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from train.planned import write_run
from train.worker.models import write_model

from hivetune.base.disk import write_json, write_manifest
from hivetune.base.journal import read_journal
from hivetune.config import RunConfig
from hivetune.process.launch import VARIABLE
from hivetune.train.supervise.supervisor import RunOutcome, supervise_run

NAN, KILL = 95, 96
WORKER = str(Path(__file__).with_name("spoiled_worker.py"))
# A run's process: its folder and the script of its worker, or "" for the real one.
SUPERVISOR = """
import json, sys
from pathlib import Path
from hivetune.config import parse_config
from hivetune.train.supervise.supervisor import supervise_run
folder = Path(sys.argv[1])
config = parse_config(json.loads((folder / "config.json").read_text()))
paths = {"model": folder / "model", "snapshot": folder / "snapshot"}
supervise_run(folder / "run", config, **paths, worker=sys.argv[2] or None).check()
"""
# A run that says nothing new for this long stands still: starting torch takes a tenth of it on busy cores.
SILENT_S = 240.0
# The comparison with transformers has tests of its own, and takes longer than most runs here.
FIXED = {"threads": 1, "agreement": {}}


class Progress:
    """Whether the run of `folder` still says something in its journals; samples come by the clock and do not count."""

    def __init__(self, folder: Path):
        self._journals = [folder / "run" / name for name in ("metrics.jsonl", "events.jsonl")]
        self._seen, self._since, self._looked = -1, 0.0, 0.0

    def check(self) -> None:
        now = time.monotonic()
        if now - self._looked < 1:
            return
        self._looked = now
        entries = [entry for path in self._journals if path.exists() for entry in read_journal(path)]
        seen = sum(entry["event"] != "sample" for entry in entries)
        if seen != self._seen:
            self._seen, self._since = seen, now
        assert now - self._since < SILENT_S, f"the run has said nothing for {SILENT_S:.0f} s"


def make_run(
    folder: Path,
    num_rows: int,
    poison: Mapping[int, int] | None = None,
    *,
    seed: int = 0,
    choices: Mapping[str, Any] | None = None,
    supervise: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunConfig:
    """`folder/run`, `folder/model` and `folder/snapshot`. `poison`: row -> token that is put into it.

    `supervise`: the limits of all runs of the test.
    """
    os.environ[VARIABLE] = json.dumps(supervise or {})
    config = write_run(folder, _rows(num_rows, poison or {}, seed), settings, {**FIXED, **(choices or {})})
    _write_model(folder / "model")
    return config


def supervise(folder: Path, config: RunConfig, *, worker: str | None = WORKER, **more: Any) -> RunOutcome:
    paths = {"model": folder / "model", "snapshot": folder / "snapshot"}
    return supervise_run(folder / "run", config, **paths, worker=worker, replay=WORKER, **more)


def _write_model(folder: Path) -> None:
    write_model(folder, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][NAN] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = {"schema": 1, "name": "tiny", "kind": "folder", "source": "tiny", "eos_ids": [2], "pad_id": 0}
    write_json(folder / "hivetune.json", described)
    write_manifest(folder)


def _rows(num_rows: int, poison: Mapping[int, int], seed: int) -> list[tuple[list[int], list[int]]]:
    numbers = random.Random(seed)
    rows = []
    for row in range(num_rows):
        tokens = [numbers.randrange(3, 90) for _ in range(numbers.randrange(6, 20))]
        if row in poison:
            tokens[2] = poison[row]
        rows.append((tokens, [0] * 4 + [1] * (len(tokens) - 4)))
    return rows
