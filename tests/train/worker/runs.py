"""Whole runs of the real training loop on a small random model, in this process: rows that can be learnt."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train.planned import Rows, write_run

from hivetune.base.journal import read_journal
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Train
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


# The comparison with transformers has tests of its own, and takes longer than most runs here.
FIXED = {"threads": 1, "products": "native", "agreement": {}}


def make_run(
    folder: Path,
    rows: Rows,
    *,
    choices: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """`folder/run` with config and plan and `folder/snapshot`: everything but the model."""
    defaults: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}, "batch_size": 8, "epochs": 2, "learning_rate": 1e-2}
    write_run(folder, rows, {**defaults, **settings}, FIXED | dict(choices or {}), SPLITS)


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
