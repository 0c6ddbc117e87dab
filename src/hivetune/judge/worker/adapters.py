"""The loss of several adapters on the same rows: the base is loaded once, and the adapters take turns."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hivetune.base.journal import DAMAGED, Journal, read_journal
from hivetune.config import LoraConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.judge.worker.score import ROWS_TOGETHER, choices_of
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, ScoreAdapters
from hivetune.train.worker.device import complete, start_with
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel, read_documents


def main(task: ScoreAdapters, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write a line {"model", "row", "nll", "tokens"} for each model and row; nll in nats, null when it is not
    finite.
    """
    heartbeat.beat(Beat.PREPARING)
    first = next(iter(task.adapters.values()))
    choices = complete(task.device, task.dtype, choices_of(first))
    device, dtype = start_with(choices)
    snapshot = open_snapshot(task.snapshot)
    known = _known(task.scores)
    adapters = {name: read_adapter(folder) for name, folder in task.adapters.items()}
    model: LoraModel | None = None
    with Journal(task.scores) as lines:
        for shape, names in _alike(adapters):
            for name in names:
                missing = [row for row in task.rows if (name, row) not in known]
                if not missing:
                    continue
                if model is None:
                    model = load_model(task.model, shape, method="lora", dtype=dtype, device=device, choices=choices)
                fill(model.adapter, adapters[name][1], str(task.adapters[name]))
                for start in range(0, len(missing), ROWS_TOGETHER):
                    documents = read_documents(snapshot, missing[start : start + ROWS_TOGETHER])
                    sums = model.nll(documents, adapter=True).tolist()
                    for document, nll in zip(documents, sums, strict=True):
                        tokens = int(document.trained_L.sum())
                        finite = nll if math.isfinite(nll) else None
                        lines.append("loss", model=name, row=document.row, nll=finite, tokens=tokens)
                        heartbeat.beat(Beat.ITEM)
            model = None  # adapters of another shape need another model
    return {"models": list(adapters), "choices": choices.made()}


def _alike(adapters: Mapping[str, tuple[LoraConfig, Mapping[str, Tensor]]]) -> list[tuple[LoraConfig, list[str]]]:
    """Group adapters that one model can hold, by the settings that it is loaded with."""
    found: dict[str, tuple[LoraConfig, list[str]]] = {}
    for name, (lora, _) in adapters.items():
        settings = lora.model_copy(update={"dropout": 0.0})
        found.setdefault(settings.model_dump_json(), (settings, []))[1].append(name)
    return list(found.values())


def _known(scores: Path) -> set[tuple[str, int]]:
    lines = read_journal(scores) if scores.exists() else ()
    return {(line["model"], line["row"]) for line in lines if line["event"] != DAMAGED}


if __name__ == "__main__":
    run_child(main, ScoreAdapters)
