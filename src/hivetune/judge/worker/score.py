"""Base and tuned model on the same rows: loss of each row, greedy answers, latency and memory; and the adapter's rank.

The loss is that of the adapter beside the base, as trained. Answers (answers.py) of the tuned model come from the
merged weights, as they are shipped. Both models are asked in turns.
"""

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hivetune.base.journal import DAMAGED, Journal, read_journal
from hivetune.config import LoraConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.judge.worker.sides import Scoring, Side, SideName, StoredScores, in_turns
from hivetune.models.architecture import A_WEIGHT
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Score
from hivetune.run.choices import Choices
from hivetune.run.folder import CONFIG, read_resolved
from hivetune.train.worker.device import complete, start_with
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.fast.kernels.build import missing_kernels_reason
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel, read_documents

ENERGY = 0.99  # of the squared norm of B A: what is beyond changes a weight by a tenth of the whole at most


def rank_use(adapter: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Any] | None:
    """`r`, `modules`, and of the directions that hold ENERGY of a module's change: `needed_median`, `needed_most`.

    Adapters on fused experts are left out. None where nothing was changed.
    """
    needed = []
    for name, a_RI in adapter.items():
        b_OR = adapter.get(name.replace(".lora_A.", ".lora_B."))
        if name.endswith(A_WEIGHT) and b_OR is not None and len(a_RI) == lora.r:
            count = directions(a_RI, b_OR)
            if count:
                needed.append(count)
    if not needed:
        return None
    return {"r": lora.r, "modules": len(needed), "needed_median": median(needed), "needed_most": max(needed)}


@torch.no_grad()
def directions(a_RI: Tensor, b_OR: Tensor) -> int:
    """The fewest singular values of B A whose squares are ENERGY of all; 0 where B A is 0.

    With B = Q S and A^T = P T (QR), B A has the singular values of S T^T, which is R x R.
    """
    _, s_RR = torch.linalg.qr(b_OR.double())
    _, t_RR = torch.linalg.qr(a_RI.double().T)
    squares_R = torch.linalg.svdvals(s_RR @ t_RR.T).square()
    total = squares_R.sum()
    if not total > 0:
        return 0
    return int((squares_R.cumsum(0) < ENERGY * total).sum()) + 1


# Rows whose loss is computed together: enough for the engine to pack them well, few enough to beat often.
ROWS_TOGETHER = 32


def main(task: Score, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    choices = complete(task.device, task.dtype, choices_of(task.adapter))
    device, dtype = start_with(choices)
    sides: dict[SideName, Side] = {"base": Side(), "tuned": Side()} if task.adapter else {"base": Side()}
    stored = read_stored(task.scores, sides)
    with Journal(task.scores) as lines:
        scoring = Scoring(
            model=task.model,
            adapter=task.adapter,
            snapshot=open_snapshot(task.snapshot),
            device=device,
            dtype=dtype,
            choices=choices,
            sides=sides,
            lines=lines,
            stored=stored,
            heartbeat=heartbeat,
        )
        path, divergence = score_losses(scoring, task.rows) if task.rows else (None, None)
        gc.collect()
        if task.generate.rows:
            # transformers costs 3.5 s of processor time; losses do without on the fast path.
            from hivetune.judge.worker.answers import score_answers

            score_answers(scoring, task.generate)
    summaries: dict[str, Any] = {name: side.summary() for name, side in sides.items()}
    rank = None
    if task.adapter is not None:
        lora, tensors = read_adapter(task.adapter)
        rank = rank_use(tensors, lora)
    summary = {"path": path, "probes_s": stored.probes_s, "rank": rank, "kl_to_base": divergence}
    return {**summaries, **summary, "choices": choices.made()}


def read_stored(scores: Path, sides: Mapping[SideName, Side]) -> StoredScores:
    """Add results of earlier tasks to `sides`. Incomplete turns and damaged lines are computed again."""
    stored = StoredScores()
    answers: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for line in read_journal(scores) if scores.exists() else ():
        if line["event"] == DAMAGED or line["model"] not in sides:
            continue
        side = sides[line["model"]]
        if line["event"] == "loss" and (line["model"], line["row"]) not in stored.losses:
            stored.losses.add((line["model"], line["row"]))
            side.add_loss(line)
        elif line["event"] == "answer":
            answers.setdefault((line["model"], line["block"]), {})[line["row"]] = line
        elif line["event"] == "turn":
            turn = (line["model"], line["block"])
            stored.turns.add(turn)
            stored.probes_s.append(line["probe_s"])
            side.add_turn(line, answers.get(turn, {}).values())
    return stored


def choices_of(adapter: Path | None) -> Choices:
    """Return the choices of the run that made the adapter, so that it is scored in the precision of its training.

    If its kernels are unavailable, the plain ones score; only a training must keep its kernels.
    """
    if adapter is None or not (adapter / CONFIG).is_file():
        return Choices()
    choices = read_resolved(adapter)[1]
    return replace(choices, kernels="torch") if choices.kernels == "native" and missing_kernels_reason() else choices


def score_losses(scoring: Scoring, rows: Sequence[int]) -> tuple[str | None, dict[str, Any] | None]:
    """Write a line {"model", "row", "nll", "tokens"} for each row and model; nll in nats, null when it is not finite.

    Returns the path of the model and the divergence of the tuned from the base model; None and None
    when every line was there before.
    """
    missing = {name: [row for row in rows if (name, row) not in scoring.stored.losses] for name in scoring.sides}
    if not any(missing.values()):
        return None, None
    lora, tensors = (LoraConfig(r=1), None) if scoring.adapter is None else read_adapter(scoring.adapter)
    model = load_model(
        scoring.model,
        lora,
        method="lora",
        dtype=scoring.dtype,
        device=scoring.device,
        choices=scoring.choices,
    )
    if tensors is not None:
        fill(model.adapter, tensors, str(scoring.adapter))
    starts = range(0, len(rows), ROWS_TOGETHER)
    for block, name in in_turns(tuple(scoring.sides), len(starts)):
        side = scoring.sides[name]
        block_rows = [row for row in rows[starts[block] : starts[block] + ROWS_TOGETHER] if row in set(missing[name])]
        if not block_rows:
            continue
        documents = read_documents(scoring.snapshot, block_rows)
        started = time.perf_counter()
        sums = model.nll(documents, adapter=name == "tuned").tolist()
        side.loss_seconds += time.perf_counter() - started
        for document, nll in zip(documents, sums, strict=True):
            tokens = int(document.trained_L.sum())
            finite = nll if math.isfinite(nll) else None
            side.add_loss(scoring.lines.append("loss", model=name, row=document.row, nll=finite, tokens=tokens))
            scoring.heartbeat.beat(Beat.ITEM)
    if scoring.adapter is None:
        return model.path, None
    return model.path, divergence_from_base(model, read_documents(scoring.snapshot, rows), scoring.heartbeat)


# KL(tuned || base) on trained tokens predicts how much of its other abilities a model forgot, better than its loss
# does (arXiv 2509.04259). It is reported, and decides nothing.

# The mean over some thousand tokens is known to a few percent; logits of longer rows would take gigabytes.
MAX_DIVERGENCE_ROWS, MAX_ROW = 32, 512


def divergence_from_base(
    model: LoraModel, documents: Sequence[Document], heartbeat: Heartbeat
) -> dict[str, Any] | None:
    """Return {"nats_per_token", "tokens", "rows"} over the trained tokens of at most MAX_DIVERGENCE_ROWS documents.
    `nats_per_token` is null when it is not finite.
    """
    short = [d for d in documents if len(d.tokens_L) <= MAX_ROW and bool(d.trained_L.any())]
    chosen = short[:: max(1, -(-len(short) // MAX_DIVERGENCE_ROWS))]
    if not chosen:
        return None
    total, tokens = 0.0, 0
    for document in chosen:
        ids, position_M = document.tokens_L.tolist(), document.trained_L.nonzero()[:, 0] - 1
        # Log-probabilities [M, V] in fp32 of what follows each position.
        tuned_MV, base_MV = (
            torch.log_softmax(model.logits(ids, adapter=adapter)[position_M.to(model.device)].float(), -1)
            for adapter in (True, False)
        )
        total += float((tuned_MV.exp() * (tuned_MV - base_MV)).sum())
        tokens += len(position_M)
        heartbeat.beat(Beat.ITEM)
    mean = total / tokens
    return {
        "nats_per_token": mean if torch.isfinite(torch.tensor(mean)) else None,
        "tokens": tokens,
        "rows": len(chosen),
    }


if __name__ == "__main__":
    run_child(main, Score)
