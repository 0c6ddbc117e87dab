"""The training loop: a plan, a snapshot and a model in; metrics, checkpoints and a PEFT adapter out.

The supervisor starts this module in a child and watches it (docs/design.md shows the way from the command to here).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hivetune.engine.exchange.coordinator import WorkerWrong
from hivetune.engine.exchange.ranks import read_ranks
from hivetune.engine.model.protocol import Document
from hivetune.engine.train.crew import serve_as_rank
from hivetune.engine.train.feed import Feed, read_documents
from hivetune.engine.train.optimizer import clip_, learning_rate
from hivetune.engine.train.session import (
    BaseNotFinite,
    LoopState,
    Session,
    StepNotFinite,
    compare_products,
    finish,
    journal,
    measure_rate,
    open_session,
    restore,
    save_now,
    save_when_due,
    score_held_out,
)
from hivetune.engine.train.stage2 import MOST_WORSE
from hivetune.engine.train.watch import Spike, after_spike, find_bad_rows, step_problem
from hivetune.plan.steps import Amendment, append_amendment, most_quarantined
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Train
from hivetune.run import checkpoints

# Gradients of activations below 6e-8 are zero in float16; a power of two changes nothing else (arXiv:1710.03740).
FLOAT16_LOSS_SCALE = 1024.0


def main(task: Train, heartbeat: Heartbeat) -> dict[str, Any]:
    ranks = read_ranks()
    if ranks.rank:
        return serve_as_rank(task, ranks, heartbeat)
    session = open_session(task, heartbeat)
    progress = restore(session)
    compare_products(session, progress.step)
    if session.stage2 is not None and progress.start_loss is None:
        progress = validate(session, progress)
    with Feed(lambda step: read_step(session, step), session.num_steps) as feed:
        progress = train(session, progress, feed)
    return finish(session, progress)


def read_step(session: Session, step: int) -> list[Document]:
    documents = read_documents(session.snapshot, session.plan.steps[step].rows)
    return documents if session.stage2 is None else session.stage2.judge(documents)


def train(session: Session, progress: LoopState, feed: Feed) -> LoopState:
    """Optimizer steps until the plan ends, validation gains no more, or a stop is asked for."""
    stop = False
    while progress.step < session.num_steps and not progress.stopped_early and not stop:
        try:
            progress, stop = make_step(session, progress, feed)
        except WorkerWrong as error:
            progress = go_back(session, error)
            feed.forget()
    return progress


def make_step(session: Session, progress: LoopState, feed: Feed) -> tuple[LoopState, bool]:
    """One step with what belongs to it, and whether to stop now; the same step is to be made again after a quarantine
    or a rollback. Raises WorkerWrong."""
    started = time.perf_counter()
    documents = feed.take(progress.step)
    step = session.plan.steps[progress.step]
    rate = learning_rate(session.config, progress.step, session.num_steps)
    loss, bad_loss, norm, grid = measure_step(session, progress, documents, step.trained_tokens)
    stop = session.heartbeat.stop_requested
    problem = step_problem(loss + (bad_loss or 0.0), norm) if step.trained_tokens else None
    if problem is not None:
        quarantine(session, progress, documents, problem)
        feed.forget()
        return progress, False
    history, spike = progress.history, None
    if step.trained_tokens:
        clip_(session.model.grad_N, norm, session.config.clip)
        session.optimizer.update(session.model.grad_N, rate=rate, number=progress.updates + 1)
        history, spike = progress.history.after(progress.step, loss)
    if spike is not None:
        feed.forget()
        return roll_back(session, spike), False
    updates = progress.updates + (step.trained_tokens > 0)
    progress = replace(progress, step=progress.step + 1, updates=updates, history=history, grid=grid)
    numbers: dict[str, float | None] = {"loss": loss, "grad_norm": norm}
    if bad_loss is not None:
        numbers["bad_loss"] = bad_loss
    if not step.trained_tokens:
        numbers = dict.fromkeys(numbers)
    tokens = {"tokens": sum(len(d.tokens_L) for d in documents), "trained_tokens": step.trained_tokens}
    journal(session, "step", step=progress.step, **numbers, lr=rate, **tokens, rows=len(documents), started=started)
    session.heartbeat.beat(Beat.ITEM)
    progress = pause(session, progress)
    if not stop:
        compare_products(session, progress.step)
        measure_rate(session, progress.step)
        save_when_due(session, progress)
    return progress, stop


def measure_step(
    session: Session, progress: LoopState, documents: Sequence[Document], trained_tokens: int
) -> tuple[float, float | None, float, int]:
    """Mean loss of good rows, that of bad answers (None outside of stage 2), gradient norm, and the grid of the next
    step's integers; the gradient is in `grad_N`.

    Reading these numbers is the only time in a step that the host waits for the device. Raises WorkerWrong.
    """
    model, stage2 = session.model, session.stage2
    loss_scale = FLOAT16_LOSS_SCALE if model.dtype == torch.float16 else 1.0
    summed = session.exchange.backward(
        documents,
        progress.step,
        scale=loss_scale / max(1, trained_tokens),
        exponent=progress.grid,
        beta=None if stage2 is None else stage2.beta,
    )
    model.grad_N.div_(loss_scale)
    norm = torch.linalg.vector_norm(model.grad_N, dtype=torch.float64)
    losses = summed.losses.to(torch.float64) / max(1, trained_tokens)
    loss, *bad_loss, norm_value = torch.cat([losses, norm[None]]).tolist()
    return loss, (bad_loss[0] if bad_loss else None), norm_value, summed.exponent


def pause(session: Session, progress: LoopState) -> LoopState:
    """Validation when it is due; at the end of a chunk also a checkpoint, and patience begins anew."""
    chunk_ended = progress.step in session.plan.chunk_ends
    if chunk_ended or progress.step % session.validate_every == 0 or progress.step == session.num_steps:
        progress = validate(session, progress)
    if chunk_ended and not progress.stopped_early:
        progress = replace(progress, without_gain=0)
        save_now(session, progress)
    return progress


def validate(session: Session, progress: LoopState) -> LoopState:
    """Loss on the run's sample of the validation rows; a new best is saved at once, `patience` times without gain stops
    the run early."""
    if not session.validation_rows:
        return progress
    loss = score_held_out(session, progress.step, session.sample_rows).loss
    if session.stage2 is not None:
        return keep_good_rows(session, progress, loss)
    if progress.best is not None and loss >= progress.best["loss"]:
        without_gain = progress.without_gain + 1
        patience = session.config.patience
        return replace(
            progress, without_gain=without_gain, stopped_early=patience is not None and without_gain >= patience
        )
    progress = replace(progress, best={"step": progress.step, "loss": loss}, without_gain=0)
    save_now(session, progress)
    return progress


def keep_good_rows(session: Session, progress: LoopState, loss: float) -> LoopState:
    """In stage 2 the newest step is the best one, as long as the good validation rows have lost no more than
    MOST_WORSE since its start; then the run stops, and the adapter is that of the last step that was within it."""
    start = loss if progress.start_loss is None else progress.start_loss
    if loss > start + MOST_WORSE:
        reason = f"the loss of good rows rose from {start:.4f} to {loss:.4f}, by more than {MOST_WORSE}"
        journal(session, "stopped_early", step=progress.step, reason=reason)
        return replace(progress, stopped_early=True)
    progress = replace(progress, start_loss=start, best={"step": progress.step, "loss": loss})
    save_now(session, progress)
    return progress


def quarantine(session: Session, progress: LoopState, documents: Sequence[Document], problem: str) -> None:
    """Amend the plan so that the rows which are not finite are never trained again; the step is then made anew.

    Raises StepNotFinite naming the rows when it is not single rows: the supervisor decides what to change;
    BaseNotFinite when nothing was trained yet, which no setting of the training can mend.
    """
    step = progress.step
    bad = find_bad_rows(session.model, documents)
    named = ", ".join(f"{row} ({session.snapshot.info(row).source})" for row in bad.rows or bad.kernel or bad.flaky)
    taken = {row for amendment in session.plan.amendments if amendment.until_step is None for row in amendment.rows}
    too_many = len(taken) + len(bad.rows) > most_quarantined(session.plan.num_rows, session.config.data.max_rejected)
    if not progress.updates and bad.rows and (too_many or len(bad.rows) == len(documents) > 1):
        raise BaseNotFinite(
            f"step {step}: {problem}, before anything was trained: the base model itself on rows {named}",
            hint="try dtype: float32, or another copy of the model",
        )
    if too_many:
        raise StepNotFinite(
            f"step {step}: {problem}; {len(taken) + len(bad.rows)} of {session.plan.num_rows} rows are not finite by "
            "now: the arithmetic, not the rows",
            hint="try dtype: float32; data.max_rejected is the share of bad rows that is tolerated",
        )
    if bad.rows and len(bad.rows) < max(2, len(documents)):
        amendment = Amendment(step, bad.rows, f"{problem} at step {step}, with this row alone too")
        append_amendment(session.folder, amendment)
        session.plan = session.plan.amended(amendment)
        journal(session, "quarantined", step=step, rows=list(bad.rows), reason=amendment.reason)
        return
    if bad.rows:
        why = f"every row of it, each alone: rows {named}"
    elif bad.kernel:
        why = f"rows {named}, but not when padded to another length: the arithmetic of this shape"
    elif bad.flaky:
        why = f"rows {named}, but not when computed again: the machine"
    else:
        why = f"rows {', '.join(str(d.row) for d in documents)} together, none of them alone"
    raise StepNotFinite(f"step {step}: {problem}; it is {why}", hint="the supervisor tries one safe change at a time")


def roll_back(session: Session, spike: Spike) -> LoopState:
    """Back to a checkpoint before the spike, its rows left out of those steps. Raises LossDiverged the third time."""
    after_spike(spike, sum(amendment.until_step is not None for amendment in session.plan.amendments))
    rows = sorted({row for step in range(spike.first, spike.last + 1) for row in session.plan.steps[step].rows})
    amendment = Amendment(spike.first, tuple(rows), spike.reason, spike.last + 1)
    session.saver.forget()
    checkpoints.distrust_after(session.folder, spike.back_to)
    append_amendment(session.folder, amendment)  # last: killed before it, the run meets the same spike again
    session.plan = session.plan.amended(amendment)
    progress = restore(session)
    journal(session, "rolled_back", step=progress.step, rows=rows, reason=spike.reason)
    return progress


def go_back(session: Session, error: WorkerWrong) -> LoopState:
    """To the newest state from before the steps that a wrong worker had a part in; they are repeated without it."""
    session.saver.forget()
    doubtful = checkpoints.distrust_after(session.folder, error.good)
    progress = restore(session)
    journal(session, "distrusted", step=progress.step, checkpoints=doubtful, reason=error.message)
    return progress


if __name__ == "__main__":
    run_child(main, Train)
