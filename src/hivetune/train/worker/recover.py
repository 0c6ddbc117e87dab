"""Recovery inside the worker: rows whose loss is not finite are removed from the plan, and a spike of the loss is
rolled back.

Such rows are found by computing the rows of a step one by one. `main` runs in the child process of an isolation
(supervise/isolate.py), which computes rows in order; if it dies, the row in work is the suspect. All other recovery is
the supervisor's.

Shapes: L positions of a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hivetune.base.journal import Journal
from hivetune.data.snapshot import open_snapshot
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Replay
from hivetune.run import checkpoints
from hivetune.run.folder import read_resolved
from hivetune.train.plan.steps import Amendment, append_amendment, max_quarantined
from hivetune.train.worker.checkpoint import load_newest_good, restore
from hivetune.train.worker.lessons import EARLY
from hivetune.train.worker.model.adapter import begin, fill
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel, read_documents
from hivetune.train.worker.session import Session, StepNotFinite, journal
from hivetune.train.worker.settle import apply_choices, complete, with_recovery_changes
from hivetune.train.worker.watch import Spike

# Kernels choose their tiles by multiples of this, so padding beyond the next one takes another kernel.
PADDING = 64
# A third spike is no matter of the data that was left out.
MAX_ROLLBACKS = 2


class LossDiverged(ArithmeticError):
    """Raised when the loss rose for the third time: rolling back and skipping data did not help."""


def quarantine(session: Session, documents: Sequence[Document], problem: str) -> None:
    """Remove the rows that are not finite from the plan; the step is then repeated without them.

    Raises StepNotFinite if no single row is the cause; the supervisor then decides what to change.
    """
    step, plan = session.state.step, session.plan
    # One rank searches: a fault that comes and goes must not take different rows out of the ranks' plans.
    bad = find_bad_rows(session.model, documents) if session.ranks.is_first else BadRows()
    bad = session.ranks.agree(bad, BadRows)
    removed = {row for amendment in plan.amendments if amendment.until_step is None for row in amendment.rows}
    most = max_quarantined(plan.num_rows, session.config.data.max_rejected) - len(removed)
    is_every_row = len(bad.rows) == len(documents) > 1
    if bad.rows and not is_every_row and len(bad.rows) <= most:
        amendment = Amendment(step, bad.rows, f"{problem} at step {step}, and again with this row alone")
        append_amendment(session.folder, amendment)
        session.plan = plan.amended(amendment)
        journal(session, "quarantined", step=step, rows=list(bad.rows), reason=amendment.reason)
        return
    rows = bad.rows or bad.unreliable or [document.row for document in documents]
    named = ", ".join(f"{row} ({session.snapshot.info(row).source})" for row in rows)
    hint = "the supervisor tries one safe change at a time"
    if bad.rows and not session.state.updates:
        # The adapter is still zero, so it is the base model, and no setting of the training can repair it.
        reason = f"before anything was trained: the base model fails on rows {named}"
        hint = "set dtype: float32, or prepare the model again from another copy"
    elif is_every_row:
        reason = f"every row of the step fails, also alone: rows {named}"
    elif bad.rows:
        reason = f"rows {named} fail too, more than data.max_rejected allows: the arithmetic is wrong, not the rows"
    elif bad.unreliable:
        reason = f"rows {named} fail alone, but not at another length: a kernel is wrong, or the machine"
    else:
        reason = f"rows {named} fail together, and none of them alone"
    raise StepNotFinite(f"step {step}: {problem}; {reason}", hint=hint)


def roll_back(session: Session, spike: Spike) -> None:
    """Return to a checkpoint before the spike, and remove the rows of its steps from the plan. Raises LossDiverged."""
    before = [a for a in session.plan.amendments if a.until_step is not None and a.reason != EARLY]
    if len(before) >= MAX_ROLLBACKS:
        raise LossDiverged(f"{spike.reason}; {len(before)} rollbacks with other data did not help: lower learning_rate")
    rows = sorted({row for step in range(spike.first, spike.last + 1) for row in session.plan.steps[step].rows})
    amendment = Amendment(spike.first, tuple(rows), spike.reason, spike.last + 1)
    checkpoints.distrust_after(session.folder, spike.first)
    # After the checkpoints are gone: killed between the two, the run meets the same spike again and comes here.
    append_amendment(session.folder, amendment)
    session.plan = session.plan.amended(amendment)
    restore(session)
    journal(session, "rolled_back", step=session.state.step, rows=rows, reason=spike.reason)


@dataclass(frozen=True)
class BadRows:
    """The rows of a step that are not finite when computed alone; the `unreliable` ones are finite at another length.

    Unreliable rows are not at fault: the cause is the arithmetic at this shape, or the machine.
    """

    rows: tuple[int, ...] = ()
    unreliable: tuple[int, ...] = ()


def find_bad_rows(model: LoraModel, documents: Sequence[Document]) -> BadRows:
    """Return which documents of a step are not finite, and whether the rows cause it.

    Leaves `grad_N` zero and torch's generators as they were; the weights are only read.
    """
    rows: list[int] = []
    unreliable: list[int] = []
    # A run whose row was quarantined has to draw the same dropout as one that never had the row.
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        for document in documents:
            if not is_finite_step(model, [document]):
                (unreliable if is_finite_step(model, [padded(document)]) else rows).append(document.row)
    return BadRows(tuple(rows), tuple(unreliable))


def is_finite_step(model: LoraModel, documents: Sequence[Document]) -> bool:
    """Return whether loss and gradient of these documents alone are finite. `grad_N` is zero afterwards."""
    model.grad_N.zero_()
    finite = bool(torch.isfinite(model.backward(documents, 1.0))) and bool(torch.isfinite(model.grad_N).all())
    model.grad_N.zero_()
    return finite


def padded(document: Document) -> Document:
    """Return the document with untrained tokens added, up to the second next multiple of 64 in length."""
    # Its shapes differ; in a causal model its loss and gradient do not.
    extra = 2 * PADDING - document.tokens_L.numel() % PADDING
    tokens_L = torch.cat([document.tokens_L, document.tokens_L[-1:].expand(extra)])
    trained_L = torch.cat([document.trained_L, torch.zeros(extra, dtype=torch.bool, device=tokens_L.device)])
    return document._replace(tokens_L=tokens_L, trained_L=trained_L)


def main(task: Replay, heartbeat: Heartbeat) -> dict[str, Any]:
    """Replay the items of `task` on the run's model: compute loss and gradient of each item alone."""
    heartbeat.beat(Beat.PREPARING)
    model, snapshot = load_newest_weights(task), open_snapshot(task.snapshot)
    with Journal(task.journal) as journal:
        journal.append("ready")
        for item in task.items:
            documents = read_documents(snapshot, item.rows)
            if item.padded:
                documents = [padded(document) for document in documents]
            # This waits for the device, so that a fault belongs to one item.
            journal.append("item", finite=is_finite_step(model, documents))
            heartbeat.beat(Beat.ITEM)
    return {"items": len(task.items)}


def load_newest_weights(task: Replay) -> LoraModel:
    """Return the run's model with the weights of its newest intact checkpoint, or with its initial ones."""
    config, choices = read_resolved(task.run)
    choices = with_recovery_changes(config, complete(config.device, config.dtype, choices), task.changes)
    device, dtype = apply_choices(choices, config.memory_share)
    model = load_model(task.model, config.lora, method=config.method, dtype=dtype, device=device, choices=choices)
    saved, _ = load_newest_good(task.run)
    if saved is None:
        begin(model.adapter, config.lora, config.seed, task.model)
    else:
        fill(model.adapter, saved.tensors["param"], f"checkpoint {saved.loop.step}")
    return model
