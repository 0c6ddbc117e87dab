"""The real worker with a broken resume: it forgets the optimizer's first moment, as a lost optimizer.pt would."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Train
from hivetune.train.worker import loop as train
from hivetune.train.worker import session
from hivetune.train.worker.checkpoint import TrainState, load_newest_good


def forget(run: Path, **options: Any) -> tuple[TrainState | None, list[str]]:
    state, problems = load_newest_good(run, **options)
    if state is None:
        return None, problems
    return replace(state, exp_avg={name: torch.zeros_like(m) for name, m in state.exp_avg.items()}), problems


def main(task: Train, heartbeat: Heartbeat) -> dict[str, Any]:
    session.load_newest_good = forget  # type: ignore[attr-defined]
    return train.main(task, heartbeat)


if __name__ == "__main__":
    run_child(main, Train)
