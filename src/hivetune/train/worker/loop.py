"""The training loop: a plan, a snapshot and a model go in; metrics, checkpoints and a PEFT adapter come out.

The supervisor starts this module in a child process (docs/design.md shows the way from the command to here). One
optimizer step is all in this file:

    make_step    read_documents(...)          the rows of the step as tensors
                 exchange.backward(...)       forward and backward: d(sum of nll / trained tokens) into `grad_N`
                 step_problem(loss, norm)     finite, or quarantine() and again; a spike of the loss: roll_back()
                 optimizer.update(...)        the gradient clipped to `clip`, and AdamW
                 journal("step", ...)         one line of metrics.jsonl, one heartbeat for the supervisor
    pause        validate(), save()           where the plan or the settings ask for it

The host reads loss and norm of each step before the update, so what is not finite never reaches the weights.

Shapes: N adapter weights.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hivetune.base.journal import read_journal
from hivetune.errors import DataRefused
from hivetune.models.architecture import read_architecture
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Train
from hivetune.run.folder import METRICS, read_resolved
from hivetune.train.plan.choose import rate_key, step_flops
from hivetune.train.plan.memory import setup_of_run
from hivetune.train.worker.checkpoint import keep_best, restore, save
from hivetune.train.worker.lessons import VALIDATIONS, check_lessons, rate_and_weights, skip_to_lessons, start_lessons
from hivetune.train.worker.model.adapter import base_name, is_as_begun, write_adapter
from hivetune.train.worker.model.protocol import read_documents
from hivetune.train.worker.recover import quarantine, roll_back
from hivetune.train.worker.session import (
    Session,
    StepNotFinite,
    journal,
    open_session,
    run_canary,
    score_validation_sample,
)
from hivetune.train.worker.settle import peak_memory_bytes
from hivetune.train.worker.watch import step_problem

# Gradients below 6e-8 are zero in float16; a power of two as a factor of the loss changes nothing else
# (arXiv:1710.03740).
LOSS_SCALES = {torch.float16: 1024.0}
# The steps from which a run's rate is taken.
STEPS_RATED = 50


def main(task: Train, heartbeat: Heartbeat) -> dict[str, Any]:
    """Train the run of `task` to its end, as one of its ranks; return the run's result."""
    session = open_session(task, heartbeat)
    restore(session)
    run_canary(session)
    train(session)
    return finish(session)


def train(session: Session) -> None:
    """Make optimizer steps until the plan ends, validation stops improving, or the supervisor asks for a stop."""
    while session.state.step < session.num_steps and not session.state.stopped_early:
        start_lessons(session)
        if not make_step(session):
            continue
        pause(session)
        if session.ranks.agree(session.heartbeat.stop_requested, bool):
            return
        run_canary(session)
        save(session, only_when_due=True)


def make_step(session: Session) -> bool:
    """Compute one optimizer step and write it to the journal. Raises StepNotFinite, LossDiverged.

    Return False if the step is repeated, because rows left the plan or because it was rolled back.
    """
    state, number = session.state, session.state.step
    # A death from here on is the step's, not that of the save before it.
    session.heartbeat.beat(Beat.WAITING)
    started = time.perf_counter()
    planned = session.plan.steps[number]
    rate, weighed = rate_and_weights(session, read_documents(session.snapshot, planned.rows))
    documents, trained_tokens = weighed.documents, planned.trained_tokens
    loss: float | None = None
    norm: float | None = None
    if trained_tokens:
        loss_scale = LOSS_SCALES.get(session.model.dtype, 1.0)
        # In one process this is torch.manual_seed of the step, a zero gradient and model.backward; in several, each
        # computes some of the micro-batches, and all have the same sum.
        summed = session.exchange.backward(documents, number, scale=loss_scale / trained_tokens, exponent=state.grid)
        grad_N = session.model.grad_N
        if loss_scale != 1:
            grad_N.div_(loss_scale)
        norm_of_grad = torch.linalg.vector_norm(grad_N, dtype=torch.float64)
        loss_of_rows = (summed.loss.to(torch.float64) - weighed.added) / trained_tokens
        # The one wait for the device in a step. Read apart, the two numbers would be two waits.
        loss, norm = torch.stack([loss_of_rows, norm_of_grad]).tolist()
        problem = step_problem(loss, norm)
        if problem is not None:
            quarantine(session, documents, problem)
            return False
        history, spike = state.history.after(number, loss)
        if spike is not None:
            roll_back(session, spike)
            return False
        # The gradient as a whole, as torch's clip_grad_norm_ does, but in float64 and from the norm that is journaled.
        if 0 < session.config.clip < norm:
            grad_N.mul_(session.config.clip / norm)
        session.optimizer.update(rate=rate, number=state.updates + 1)
        state = replace(state, updates=state.updates + 1, history=history, grid=summed.exponent)
    session.state = replace(state, step=number + 1)
    journal(
        session,
        "step",
        step=session.state.step,
        loss=loss,
        grad_norm=norm,
        lr=rate,
        tokens=sum(len(document.tokens_L) for document in documents),
        trained_tokens=trained_tokens,
        rows=len(documents),
        started=started,
    )
    session.heartbeat.beat(Beat.ITEM)
    return True


def pause(session: Session) -> None:
    """Validate if it is due; at the end of a chunk also save a checkpoint and reset the patience."""
    step, plan = session.state.step, session.plan
    ends_chunk = step in plan.chunk_ends
    if plan.lessons_from is not None and step > plan.lessons_from:
        every = max(1, (session.num_steps - plan.lessons_from) // VALIDATIONS)
        is_due = (step - plan.lessons_from) % every == 0
    else:
        is_due = ends_chunk or step % session.validate_every == 0
    if is_due or step == session.num_steps:
        validate(session)
    if ends_chunk and not session.state.stopped_early:
        session.state = replace(session.state, without_gain=0)
        save(session)


def validate(session: Session) -> None:
    """Score the sample of validation rows. If the loss is the best so far, save a checkpoint; after `patience`
    validations without a new best, end the training."""
    state = session.state
    if not session.sample_rows:
        return
    loss = score_validation_sample(session).loss
    if state.start_loss is not None:
        check_lessons(session, loss)
    elif state.best is not None and loss >= state.best["loss"]:
        without_gain, patience = state.without_gain + 1, session.config.patience
        session.state = replace(state, without_gain=without_gain)
        if patience is not None and without_gain >= patience and not skip_to_lessons(session):
            session.state = replace(session.state, stopped_early=True)
    else:
        session.state = replace(state, best={"step": state.step, "loss": loss}, without_gain=0)
        save(session)


def finish(session: Session) -> dict[str, Any]:
    """Save, write the adapter (the best by validation, else the last), and return the run's result.

    Raises StepNotFinite for an adapter that is still what it was at the start after updates were made, and DataRefused
    when the plan ended and none of its rows could be trained: neither is a success.
    """
    # Products are tested once more, because all since the last test counts only if they still come out right.
    run_canary(session, every_s=0)
    save(session)
    state, model = session.state, session.model
    is_done = state.stopped_early or state.step == session.num_steps
    if is_done and not state.updates:
        raise DataRefused(f"{session.folder}: no row was trained, all were quarantined", hint="see amendments.jsonl")
    adapter_step = None
    if state.updates and session.ranks.is_first:
        if is_as_begun(model.adapter, session.config.lora):
            raise StepNotFinite(f"after {state.updates} updates the adapter is what it was at the start")
        adapter, adapter_step = keep_best(session)
        write_adapter(session.folder, adapter, session.config.lora, *base_name(session.model_folder))
    session.metrics.close()
    if session.events is not None:
        session.events.close()
    metrics = list(read_journal(session.folder / METRICS))
    return {
        "status": "done" if is_done else "stopped",
        "steps": state.step,
        "steps_planned": session.num_steps,
        "stopped_early": state.stopped_early,
        "best": state.best,
        "adapter_step": adapter_step,
        **_totals(metrics),
        "peak_memory_bytes": peak_memory_bytes(model.device),
        "rate": _rate(session, metrics),
        "path": model.path,
        "why": model.why,
        "kernels": model.kernels,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _rate(session: Session, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the operations a second of the run's steps, and its key for the plan; None for several ranks."""
    # Without the first step, which warms up. What the plan predicts from is the rate of one rank.
    steps = _counted(metrics)[1:][:STEPS_RATED]
    if not steps or session.ranks.size > 1:
        return None
    config, choices = read_resolved(session.folder)
    kind = "cpu" if session.model.device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
    setup = replace(
        setup_of_run(config, read_architecture(session.model_folder), choices, kind), path=session.model.path
    )
    rows = [row for entry in steps for row in session.plan.steps[entry["step"] - 1].rows]
    data = session.snapshot
    flops = step_flops(setup, ((data.length(row), data.num_trained(row)) for row in rows))
    return {"key": rate_key(setup), "flops_per_s": flops / sum(entry["seconds"] for entry in steps)}


def _totals(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over all steps of the run, whichever worker made them."""
    steps = _counted(metrics)
    seconds = sum(entry["seconds"] for entry in steps)
    tokens, rows = sum(entry["tokens"] for entry in steps), sum(entry["rows"] for entry in steps)
    return {
        "tokens": tokens,
        "trained_tokens": sum(entry["trained_tokens"] for entry in steps),
        "loss_first": steps[0]["loss"] if steps else None,
        "loss_last": steps[-1]["loss"] if steps else None,
        "train_seconds": round(seconds, 3),
        "tokens_per_second": tokens / seconds if seconds else None,
        "samples_per_second": rows / seconds if seconds else None,
    }


def _counted(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the `step` events of steps that still had rows to train."""
    return [entry for entry in metrics if entry["event"] == "step" and entry["loss"] is not None]
