"""The training loop: a plan, a snapshot and a model in; metrics, checkpoints and a PEFT adapter out.

The supervisor starts this module in a child and watches it (docs/design.md shows the way from the command to here).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hivetune.models.architecture import read_architecture
from hivetune.process.child import Heartbeat, read_ranks, run_child
from hivetune.process.protocol import Beat, Train
from hivetune.run import checkpoints
from hivetune.train.plan.steps import Amendment, append_amendment, most_quarantined
from hivetune.train.worker.crew import serve_as_rank
from hivetune.train.worker.exchange.coordinator import WorkerWrong
from hivetune.train.worker.exchange.pack import step_seed
from hivetune.train.worker.feed import Feed, read_documents
from hivetune.train.worker.measure import canary
from hivetune.train.worker.measure.probe import is_measured
from hivetune.train.worker.measure.rates import own_canary
from hivetune.train.worker.model.protocol import Document
from hivetune.train.worker.optimizer import learning_rate
from hivetune.train.worker.session import (
    BaseNotFinite,
    LoopState,
    Session,
    StepNotFinite,
    compare_products,
    finish,
    journal,
    open_session,
    restore,
    save_now,
    save_when_due,
    score_held_out,
)
from hivetune.train.worker.stage2 import MOST_WORSE
from hivetune.train.worker.updater import StepAnswer, loss_scale_of
from hivetune.train.worker.watch import Spike, after_spike, find_bad_rows, step_problem


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
    """In the feed's thread: what the host can do of a step while the device computes the one before."""
    documents = read_documents(session.snapshot, session.plan.steps[step].rows)
    if session.stage2 is not None:
        return session.stage2.judge(documents)
    if session.runs_ahead:
        session.model.lay_ahead(documents, step_seed(session.config.seed, step))
    return documents


@dataclass(frozen=True)
class Given:
    """A step that the device was given: its answer may not have been read yet. `grid`: of the next step's integers."""

    number: int
    documents: list[Document]
    rate: float
    trained_tokens: int
    answer: StepAnswer | None
    """None for a step that trains no token."""
    grid: int
    started: float


def train(session: Session, progress: LoopState, feed: Feed) -> LoopState:
    """Optimizer steps until the plan ends, validation gains no more, or a stop is asked for."""
    before, stop = None, False
    while progress.step < session.num_steps and not progress.stopped_early and not stop:
        try:
            progress, before, stop = advance(session, progress, before, feed)
        except WorkerWrong as error:
            progress, before = go_back(session, error), None
            start_anew(session, feed)
    return progress


def advance(
    session: Session, progress: LoopState, before: Given | None, feed: Feed
) -> tuple[LoopState, Given | None, bool]:
    """Give out one step, read the one `before` it; and its own answer too, with what belongs to the end of a step,
    unless the session runs ahead and nothing comes between this step and the next that looks at the weights.

    Returns the step whose answer is still to be read, and whether to stop now. Raises WorkerWrong.
    """
    given = give_step(session, progress, before, feed)
    stop = session.heartbeat.stop_requested
    waits = stop or not session.runs_ahead or comes_between(session, given.number + 1)
    for answered in (before, given) if waits else (before,):
        if answered is None:
            continue
        progress, counts = end_step(session, progress, answered)
        if not counts:  # a step that was given out after it changed nothing, or is taken back with it
            start_anew(session, feed)
            return progress, None, False
    if not waits:
        return progress, given, False
    progress = pause(session, progress)
    if not stop:
        compare_products(session, progress.step)
        measure_rate(session, progress.step)
        save_when_due(session, progress)
    return progress, None, stop


def comes_between(session: Session, step: int) -> bool:
    """Whether something is due after `step` steps that must find the weights as those left them, or the device idle."""
    tested = time.monotonic() - session.numbers_tested
    return (
        is_pause(session, step)
        or tested >= canary.EVERY_S
        or is_measured(step)
        or session.saver.due is not None
    )  # fmt: skip


def start_anew(session: Session, feed: Feed) -> None:
    """The next step is not the one that was expected: what was read ahead may be wrong, and updates count again."""
    feed.forget()
    session.updater.go_on()


def give_step(session: Session, progress: LoopState, before: Given | None, feed: Feed) -> Given:
    """Hand the next step to the device: gradient, check and update. `before`: one whose answer was not read yet.

    Nothing here waits for the device where the exchange does not. Raises WorkerWrong.
    """
    started = time.perf_counter()
    number = progress.step if before is None else before.number + 1
    documents = feed.take(number)
    trained_tokens = session.plan.steps[number].trained_tokens
    rate = learning_rate(session.config, number, session.num_steps)
    if not trained_tokens:
        return Given(number, documents, rate, 0, None, progress.grid, started)
    updates = progress.updates + (before is not None and before.trained_tokens > 0)
    session.updater.begin(rate=rate, number=updates + 1, trained_tokens=trained_tokens)
    summed = session.exchange.backward(
        documents,
        number,
        scale=loss_scale_of(session.model.dtype) / trained_tokens,
        exponent=progress.grid,
        beta=None if session.stage2 is None else session.stage2.beta,
    )
    session.updater.apply(summed.losses)
    return Given(number, documents, rate, trained_tokens, session.updater.answer(), summed.exponent, started)


def end_step(session: Session, progress: LoopState, given: Given) -> tuple[LoopState, bool]:
    """Read what a step came to and journal it. False: it does not count, its rows are out of the plan or it was rolled
    back; it is made anew. Raises StepNotFinite, LossDiverged."""
    numbers: dict[str, float | None] = {"loss": None, "grad_norm": None}
    history = progress.history
    judged = {"bad_loss"} if session.stage2 is not None else set()
    if given.answer is not None:
        loss, bad_loss, norm = given.answer.read()
        problem = step_problem(loss + bad_loss, norm)
        if problem is not None:
            quarantine(session, progress, given.documents, problem)
            return progress, False
        history, spike = history.after(given.number, loss)
        if spike is not None:
            return roll_back(session, spike), False
        numbers = {"loss": loss, "grad_norm": norm, **dict.fromkeys(judged, bad_loss)}
    numbers = {**dict.fromkeys(judged), **numbers}
    progress = replace(
        progress,
        step=given.number + 1,
        updates=progress.updates + (given.trained_tokens > 0),
        history=history,
        grid=given.grid,
    )
    tokens = {"tokens": sum(len(d.tokens_L) for d in given.documents), "trained_tokens": given.trained_tokens}
    started = max(given.started, session.step_ended)  # no second counts for two steps
    journal(
        session, "step", step=progress.step, **numbers, lr=given.rate, **tokens, rows=len(given.documents),
        started=started,
    )  # fmt: skip
    session.step_ended = time.perf_counter()
    session.heartbeat.beat(Beat.ITEM)
    return progress, True


def pause(session: Session, progress: LoopState) -> LoopState:
    """Validation when it is due; at the end of a chunk also a checkpoint, and patience begins anew."""
    if is_pause(session, progress.step):
        progress = validate(session, progress)
    if progress.step in session.plan.chunk_ends and not progress.stopped_early:
        progress = replace(progress, without_gain=0)
        save_now(session, progress)
    return progress


def is_pause(session: Session, step: int) -> bool:
    return step in session.plan.chunk_ends or step % session.validate_every == 0 or step == session.num_steps


def measure_rate(session: Session, step: int) -> None:
    """The rate of the run's own product, now and then while the prediction is held against what comes."""
    if is_measured(step):
        architecture = read_architecture(session.model_folder)
        dtype = str(session.model.dtype).removeprefix("torch.")
        journal(session, "rate", step=step, flops_per_s=own_canary(architecture, dtype, session.model.device))


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
