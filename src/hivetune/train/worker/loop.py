"""The training loop: a plan, a snapshot and a model go in; metrics, checkpoints and a PEFT adapter come out.

The supervisor starts this module in a child process (docs/design.md shows the way from the command to here). One
optimizer step is all in this file:

    make_step    read_documents(...)          the rows of the step as tensors
                 exchange.backward(...)       forward and backward: d(sum of nll / trained tokens) into `grad_N`
                 step_problem(loss, norm)     finite, or quarantine() and again; a spike of the loss: roll_back()
                 optimizer.update(...)        the gradient clipped to `clip`, and AdamW
                 journal("step", ...)         one line of metrics.jsonl, one heartbeat for the supervisor
    pause        validate(), save_now()       where the plan or the settings ask for it

The host reads loss and norm of each step before the update, so what is not finite never reaches the weights.

Shapes: N adapter weights.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Train
from hivetune.run import checkpoints
from hivetune.train.plan.steps import Amendment, append_amendment, max_quarantined
from hivetune.train.worker import lessons
from hivetune.train.worker.checkpoint import kept_adapter
from hivetune.train.worker.model.adapter import fill
from hivetune.train.worker.model.protocol import Document, read_documents
from hivetune.train.worker.optimizer import learning_rate
from hivetune.train.worker.session import (
    BaseNotFinite,
    LoopState,
    Session,
    StepNotFinite,
    better_of,
    compare_products,
    finish,
    journal,
    open_session,
    read_reference,
    restore,
    save_now,
    save_when_due,
    score_held_out,
)
from hivetune.train.worker.watch import BadRows, Spike, check_rollbacks, find_bad_rows, step_problem


def main(task: Train, heartbeat: Heartbeat) -> dict[str, Any]:
    """Train the run of `task` to its end, as one of its ranks; return the run's result."""
    session = open_session(task, heartbeat)
    loop = Loop(session, restore(session))
    compare_products(session, loop.state.step)
    loop.train()
    return finish(session, loop.state)


# The reason of the amendment that skips steps before the lessons.
EARLY = "validation stopped improving"


class Loop:
    """The steps of one run. `state` is what the loop knows after the newest step that counts."""

    def __init__(self, session: Session, state: LoopState):
        self.session, self.state = session, state

    def train(self) -> None:
        """Make optimizer steps until the plan ends, validation stops improving, or the supervisor asks for a stop."""
        session = self.session
        while self.state.step < session.num_steps and not self.state.stopped_early:
            self.begin_lessons()
            if not self.make_step():
                continue
            self.pause()
            if session.ranks.agree(session.heartbeat.stop_requested, bool):
                return
            compare_products(session, self.state.step)
            save_when_due(session, self.state)

    def make_step(self) -> bool:
        """Compute the next step and journal it. Raises StepNotFinite, LossDiverged.

        Return False where it does not count and is made again: its rows left the plan, or it was rolled back.
        """
        session, state, number = self.session, self.state, self.state.step
        session.heartbeat.beat(Beat.WAITING)  # a death from here on is the step's, not that of the save before it
        started = time.perf_counter()
        documents = read_documents(session.snapshot, session.plan.steps[number].rows)
        trained_tokens = session.plan.steps[number].trained_tokens
        lessons_from = session.plan.lessons_from
        added = 0.0
        if lessons_from is not None and number >= lessons_from:
            rate = lessons.RATE * learning_rate(session.config, number - lessons_from, session.num_steps - lessons_from)
            assert session.reference is not None
            weighed = lessons.weigh(documents, better_of(session), session.reference, session.exchange.nll)
            documents, added = weighed.documents, weighed.added
        else:
            rate = learning_rate(session.config, number, lessons_from or session.num_steps)
        loss: float | None = None
        norm: float | None = None
        if trained_tokens:
            loss_scale = loss_scale_of(session.model.dtype)
            # In one process this is torch.manual_seed of the step, a zero gradient and model.backward; in several, each
            # computes some of the micro-batches, and all have the same sum.
            summed = session.exchange.backward(
                documents, number, scale=loss_scale / trained_tokens, exponent=state.grid
            )
            grad_N = session.model.grad_N
            if loss_scale != 1:
                grad_N.div_(loss_scale)
            norm_of_grad = torch.linalg.vector_norm(grad_N, dtype=torch.float64)
            loss, norm = torch.stack([(summed.loss.to(torch.float64) - added) / trained_tokens, norm_of_grad]).tolist()
            problem = step_problem(loss, norm)
            if problem is not None:
                self.quarantine(documents, problem)
                return False
            history, spike = state.history.after(number, loss)
            if spike is not None:
                self.roll_back(spike)
                return False
            if 0 < session.config.clip < norm:  # the gradient as a whole, down to this norm
                grad_N.mul_(session.config.clip / norm)
            session.optimizer.update(rate=rate, number=state.updates + 1)
            state = replace(state, updates=state.updates + 1, history=history, grid=summed.exponent)
        self.state = replace(state, step=number + 1)
        journal(
            session,
            "step",
            step=self.state.step,
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

    def begin_lessons(self) -> None:
        """Begin to learn from bad answers, where that is due: from the best adapter so far, with its losses as the
        reference; or read what a process before this one began with."""
        session, state = self.session, self.state
        if session.plan.lessons_from is None or state.step < session.plan.lessons_from:
            return
        if state.start_loss is not None:
            if session.reference is None:
                read_reference(session, state.step, anew=False)
            return
        if session.ranks.is_first:
            adapter, _, problem = kept_adapter(session.folder, session.model.adapter, state.step, state.best)
            if problem:
                journal(session, "problem", step=state.step, text=problem)
            fill(session.model.adapter, dict(adapter), "the adapter that the lessons begin with")
        session.ranks.agree(True, bool, [session.model.master_N])
        read_reference(session, state.step, anew=True)
        loss = score_held_out(session, state.step, session.sample_rows).loss
        self.state = replace(state, start_loss=loss, best={"step": state.step, "loss": loss})
        save_now(session, self.state)

    def skip_to_lessons(self) -> bool:
        """Go on with the lessons where training before them gains nothing any more. Return whether there are any."""
        session, step, lessons_from = self.session, self.state.step, self.session.plan.lessons_from
        if lessons_from is None or step >= lessons_from:
            return False
        rows = sorted({row for number in range(step, lessons_from) for row in session.plan.steps[number].rows})
        amendment = Amendment(step, tuple(rows), EARLY, lessons_from)
        append_amendment(session.folder, amendment)
        session.plan = session.plan.amended(amendment)
        self.state = replace(self.state, step=lessons_from, without_gain=0)
        return True

    def is_pause(self, step: int) -> bool:
        """Return whether validation is due after `step` steps."""
        session = self.session
        lessons_from = session.plan.lessons_from
        if lessons_from is not None and step > lessons_from:
            every = max(1, (session.num_steps - lessons_from) // lessons.VALIDATIONS)
            return (step - lessons_from) % every == 0 or step == session.num_steps
        return step in session.plan.chunk_ends or step % session.validate_every == 0 or step == session.num_steps

    def pause(self) -> None:
        """Validate where it is due; at the end of a chunk also save a checkpoint, and reset the patience."""
        if self.is_pause(self.state.step):
            self.validate()
        if self.state.step in self.session.plan.chunk_ends and not self.state.stopped_early:
            self.state = replace(self.state, without_gain=0)
            save_now(self.session, self.state)

    def validate(self) -> None:
        """Score the sample of validation rows. A new best is saved; `patience` times without one ends the run."""
        session, state = self.session, self.state
        if not session.validation_rows:
            return
        loss = score_held_out(session, state.step, session.sample_rows).loss
        if state.start_loss is not None:
            self.check_lessons(loss)
        elif state.best is not None and loss >= state.best["loss"]:
            without_gain, patience = state.without_gain + 1, session.config.patience
            self.state = replace(state, without_gain=without_gain)
            if patience is not None and without_gain >= patience and not self.skip_to_lessons():
                self.state = replace(self.state, stopped_early=True)
        else:
            self.state = replace(state, best={"step": state.step, "loss": loss}, without_gain=0)
            save_now(session, self.state)

    def check_lessons(self, loss: float) -> None:
        """End the lessons when the validation rows have lost more than MAX_LOSS_RISE since they began.

        Until then the newest step is the best one, so the adapter is that of the last step within the bound.
        """
        session, state = self.session, self.state
        assert state.start_loss is not None
        if loss > state.start_loss + lessons.MAX_LOSS_RISE:
            reason = f"the loss of good rows rose from {state.start_loss:.4f} to {loss:.4f}"
            journal(session, "stopped_early", step=state.step, reason=reason)
            self.state = replace(state, stopped_early=True)
            return
        self.state = replace(state, best={"step": state.step, "loss": loss})
        save_now(session, self.state)

    def quarantine(self, documents: Sequence[Document], problem: str) -> None:
        """Take the rows that are not finite out of the plan; the step is then made again without them.

        Raises StepNotFinite where single rows are not the cause: the supervisor decides what to change. Raises
        BaseNotFinite where nothing was trained yet, which no setting of the training can repair.
        """
        session, step = self.session, self.state.step
        # One rank searches: a fault that comes and goes must not take different rows out of the ranks' plans.
        bad = find_bad_rows(session.model, documents) if session.ranks.is_first else BadRows()
        bad = session.ranks.agree(bad, BadRows)
        named = ", ".join(f"{row} ({session.snapshot.info(row).source})" for row in bad.rows or bad.kernel or bad.flaky)
        amendments = session.plan.amendments
        removed = {row for amendment in amendments if amendment.until_step is None for row in amendment.rows}
        count = len(removed) + len(bad.rows)
        most = max_quarantined(session.plan.num_rows, session.config.data.max_rejected)
        if not self.state.updates and bad.rows and (count > most or len(bad.rows) == len(documents) > 1):
            raise BaseNotFinite(
                f"step {step}: {problem} before anything was trained: the base model fails on rows {named}",
                hint="set dtype: float32, or prepare the model again from another copy",
            )
        if count > most:
            raise StepNotFinite(
                f"step {step}: {problem}. {count} of {session.plan.num_rows} rows have failed so far, more than the "
                f"{most} that data.max_rejected allows: the arithmetic is wrong, not the rows",
                hint="set dtype: float32; raise data.max_rejected only if so many rows are really broken",
            )
        if bad.rows and len(bad.rows) < max(2, len(documents)):
            amendment = Amendment(step, bad.rows, f"{problem} at step {step}, and again with this row alone")
            append_amendment(session.folder, amendment)
            session.plan = session.plan.amended(amendment)
            journal(session, "quarantined", step=step, rows=list(bad.rows), reason=amendment.reason)
            return
        if bad.rows:
            reason = f"every row of the step fails, also alone: rows {named}"
        elif bad.kernel:
            reason = f"rows {named} fail, but not padded to another length: a kernel is wrong at this shape"
        elif bad.flaky:
            reason = f"rows {named} failed once and not again: the machine computes unreliably"
        else:
            rows = ", ".join(str(document.row) for document in documents)
            reason = f"rows {rows} fail together, and none of them alone"
        raise StepNotFinite(f"step {step}: {problem}; {reason}", hint="the supervisor tries one safe change at a time")

    def roll_back(self, spike: Spike) -> None:
        """Return to a checkpoint before the spike and leave its rows out of those steps. Raises LossDiverged."""
        session = self.session
        before = [a for a in session.plan.amendments if a.until_step is not None and a.reason != EARLY]
        check_rollbacks(spike, len(before))
        rows = sorted({row for step in range(spike.first, spike.last + 1) for row in session.plan.steps[step].rows})
        amendment = Amendment(spike.first, tuple(rows), spike.reason, spike.last + 1)
        checkpoints.distrust_after(session.folder, spike.first)
        append_amendment(session.folder, amendment)  # last: killed before it, the run meets the same spike again
        session.plan = session.plan.amended(amendment)
        self.state = restore(session)
        journal(session, "rolled_back", step=self.state.step, rows=rows, reason=spike.reason)


def loss_scale_of(dtype: torch.dtype) -> float:
    """Return the factor of the loss.

    Gradients below 6e-8 are zero in float16; a power of two changes nothing else (arXiv:1710.03740).
    """
    return 1024.0 if dtype == torch.float16 else 1.0
