"""The training loop: a plan, a snapshot and a model go in; metrics, checkpoints and a PEFT adapter come out.

The supervisor starts this module in a child process (docs/design.md shows the way from the command to here). One
optimizer step is all in this file:

    give_step    feed.take(step)              the rows of the step as tensors; a thread reads the next step's meanwhile
                 exchange.backward(...)       forward and backward: d(sum of nll / trained tokens) into `grad_N`
                 updater.apply(losses)        the device's half: finite or stop, clip the norm, AdamW
    end_step     answer.read()                the loss and the norm come to the host
                 quarantine(), roll_back()    a number that is not finite, or a spike of the loss
                 journal("step", ...)         one line of metrics.jsonl, one heartbeat for the supervisor
    pause        validate(), save_now()       where the plan or the settings ask for it

The host waits for the device in `read` only. On a card it reads the answer of one step after it has given out the next
one, so the card never waits for Python; the check on the device keeps the weights safe meanwhile (see `Updater`).

Shapes: N adapter weights.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hivetune.models.architecture import read_architecture
from hivetune.process.child import Heartbeat, read_ranks, run_child
from hivetune.process.protocol import Beat, Train
from hivetune.run import checkpoints
from hivetune.train.plan.steps import Amendment, append_amendment, max_quarantined
from hivetune.train.worker.exchange.trust import WorkerWrong
from hivetune.train.worker.exchange.work import step_seed
from hivetune.train.worker.exchange.worker import serve_as_rank
from hivetune.train.worker.measure import canary
from hivetune.train.worker.measure.probe import is_measured
from hivetune.train.worker.measure.rates import own_canary
from hivetune.train.worker.model.memory import to_device, unwritten
from hivetune.train.worker.model.protocol import Document, read_documents
from hivetune.train.worker.optimizer import AdamW, learning_rate
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
from hivetune.train.worker.stage2 import MAX_LOSS_RISE
from hivetune.train.worker.watch import Spike, check_rollbacks, find_bad_rows, step_problem


def main(task: Train, heartbeat: Heartbeat) -> dict[str, Any]:
    """Train the run of `task` to its end; return its result. A rank of torchrun above 0 only computes packs."""
    ranks = read_ranks()
    if ranks.rank:
        return serve_as_rank(task, ranks, heartbeat)
    session = open_session(task, heartbeat)
    loop = Loop(session, restore(session))
    compare_products(session, loop.state.step)
    if session.stage2 is not None and loop.state.start_loss is None:
        loop.validate()
    loop.train()
    return finish(session, loop.state)


@dataclass(frozen=True)
class Step:
    """A step that the device was given, and whose answer may still be on its way."""

    number: int
    documents: list[Document]
    rate: float
    trained_tokens: int
    answer: "StepAnswer | None"
    """None for a step that trains no token."""
    grid: int
    """The exponent of the next step's integers, where workers add them."""
    started: float


class Loop:
    """The steps of one run. `state` is what the loop knows after the newest step that counts."""

    def __init__(self, session: Session, state: LoopState):
        self.session, self.state = session, state
        self.feed = Feed(self.read_step, session.num_steps)
        model, clip = session.model, session.config.clip
        scale = loss_scale_of(model.dtype)
        self.updater = Updater(model.grad_N, session.optimizer, clip=clip, loss_scale=scale, repeat=model.repeat)
        self.unread: Step | None = None

    def train(self) -> None:
        """Make optimizer steps until the plan ends, validation stops improving, or the supervisor asks for a stop."""
        stop = False
        with self.feed:
            while self.state.step < self.session.num_steps and not self.state.stopped_early and not stop:
                try:
                    stop = self.advance()
                except WorkerWrong as error:
                    self.go_back(error)
                    self.start_anew()

    def advance(self) -> bool:
        """Give out one step and read the one before it. Return whether to stop now. Raises WorkerWrong.

        The new step is read at once too, unless the session runs ahead and nothing that looks at the weights is due
        between this step and the next.
        """
        session, before, step = self.session, self.unread, self.give_step()
        stop = session.heartbeat.stop_requested
        read_now = stop or not session.runs_ahead or self.is_anything_due(step.number + 1)
        for ended in (before, step) if read_now else (before,):
            if ended is not None and not self.end_step(ended):
                self.start_anew()  # a step that was given out after it changed nothing, or is taken back with it
                return False
        self.unread = None if read_now else step
        if read_now:
            self.pause()
        if read_now and not stop:
            compare_products(session, self.state.step)
            self.measure_rate()
            save_when_due(session, self.state)
        return stop

    def read_step(self, number: int) -> list[Document]:
        """Do the host's part of a step in the feed's thread, while the device computes the previous step."""
        session = self.session
        documents = read_documents(session.snapshot, session.plan.steps[number].rows)
        if session.stage2 is not None:
            return session.stage2.judge(documents)
        if session.runs_ahead:
            session.model.lay_ahead(documents, step_seed(session.config.seed, number))
        return documents

    def give_step(self) -> Step:
        """Hand the next step to the device: gradient, check and update. Raises WorkerWrong.

        Nothing here waits for the device where the exchange does not.
        """
        session, state, before = self.session, self.state, self.unread
        started = time.perf_counter()
        number = state.step if before is None else before.number + 1
        documents = self.feed.take(number)
        trained_tokens = session.plan.steps[number].trained_tokens
        rate = learning_rate(session.config, number, session.num_steps)
        if not trained_tokens:
            return Step(number, documents, rate, 0, None, state.grid, started)
        updates = state.updates + (before is not None and before.trained_tokens > 0)
        self.updater.begin(rate=rate, number=updates + 1, trained_tokens=trained_tokens)
        # In one process this is torch.manual_seed of the step, a zero gradient and model.backward.
        summed = session.exchange.backward(
            documents,
            number,
            scale=loss_scale_of(session.model.dtype) / trained_tokens,
            exponent=state.grid,
            beta=None if session.stage2 is None else session.stage2.beta,
        )
        self.updater.apply(summed.losses)
        return Step(number, documents, rate, trained_tokens, self.updater.answer(), summed.exponent, started)

    def end_step(self, step: Step) -> bool:
        """Read the result of a step and journal it. Raises StepNotFinite, LossDiverged.

        Return False where it does not count and is made again: its rows left the plan, or it was rolled back.
        """
        session, history = self.session, self.state.history
        loss: float | None = None
        bad_loss: float | None = None
        norm: float | None = None
        if step.answer is not None:
            loss, bad_loss, norm = step.answer.read()
            problem = step_problem(loss + bad_loss, norm)
            if problem is not None:
                self.quarantine(step.documents, problem)
                return False
            history, spike = history.after(step.number, loss)
            if spike is not None:
                self.roll_back(spike)
                return False
        self.state = replace(
            self.state,
            step=step.number + 1,
            updates=self.state.updates + (step.trained_tokens > 0),
            history=history,
            grid=step.grid,
        )
        journal(
            session,
            "step",
            step=self.state.step,
            **({"bad_loss": bad_loss} if session.stage2 is not None else {}),
            loss=loss,
            grad_norm=norm,
            lr=step.rate,
            tokens=sum(len(document.tokens_L) for document in step.documents),
            trained_tokens=step.trained_tokens,
            rows=len(step.documents),
            started=max(step.started, session.step_ended),  # no second counts for two steps
        )
        session.step_ended = time.perf_counter()
        session.heartbeat.beat(Beat.ITEM)
        return True

    def start_anew(self) -> None:
        """Prepare for another step than the expected one: steps read ahead may be wrong, and updates count again."""
        self.unread = None
        self.feed.forget()
        self.updater.go_on()

    def is_anything_due(self, step: int) -> bool:
        """Return whether something is due after `step` steps that needs their weights, or an idle device."""
        tested = time.monotonic() - self.session.numbers_tested
        return (
            self.is_pause(step)
            or tested >= canary.EVERY_S
            or is_measured(step)
            or self.session.saver.due is not None
        )  # fmt: skip

    def is_pause(self, step: int) -> bool:
        """Return whether validation is due after `step` steps."""
        session = self.session
        return step in session.plan.chunk_ends or step % session.validate_every == 0 or step == session.num_steps

    def pause(self) -> None:
        """Validate where it is due; at the end of a chunk also save a checkpoint, and reset the patience."""
        if self.is_pause(self.state.step):
            self.validate()
        if self.state.step in self.session.plan.chunk_ends and not self.state.stopped_early:
            self.state = replace(self.state, without_gain=0)
            save_now(self.session, self.state)

    def measure_rate(self) -> None:
        """Time the run's own product at some of the first steps: the prediction is compared with that rate."""
        session = self.session
        if is_measured(self.state.step):
            architecture = read_architecture(session.model_folder)
            rate = own_canary(architecture, str(session.model.dtype).removeprefix("torch."), session.model.device)
            journal(session, "rate", step=self.state.step, flops_per_s=rate)

    def validate(self) -> None:
        """Score the sample of validation rows. A new best is saved; `patience` times without one ends the run."""
        session, state = self.session, self.state
        if not session.validation_rows:
            return
        loss = score_held_out(session, state.step, session.sample_rows).loss
        if session.stage2 is not None:
            self.check_good_rows(loss)
        elif state.best is not None and loss >= state.best["loss"]:
            without_gain, patience = state.without_gain + 1, session.config.patience
            stopped = patience is not None and without_gain >= patience
            self.state = replace(state, without_gain=without_gain, stopped_early=stopped)
        else:
            self.state = replace(state, best={"step": state.step, "loss": loss}, without_gain=0)
            save_now(session, self.state)

    def check_good_rows(self, loss: float) -> None:
        """End a run of stage 2 when its good validation rows have lost more than MAX_LOSS_RISE since the start.

        Until then the newest step is the best one, so the adapter is that of the last step within the bound.
        """
        session, state = self.session, self.state
        start = loss if state.start_loss is None else state.start_loss
        if loss > start + MAX_LOSS_RISE:
            reason = f"the loss of good rows rose from {start:.4f} to {loss:.4f}, by more than {MAX_LOSS_RISE}"
            journal(session, "stopped_early", step=state.step, reason=reason)
            self.state = replace(state, stopped_early=True)
            return
        self.state = replace(state, start_loss=start, best={"step": state.step, "loss": loss})
        save_now(session, self.state)

    def quarantine(self, documents: Sequence[Document], problem: str) -> None:
        """Take the rows that are not finite out of the plan; the step is then made again without them.

        Raises StepNotFinite where single rows are not the cause: the supervisor decides what to change. Raises
        BaseNotFinite where nothing was trained yet, which no setting of the training can repair.
        """
        session, step = self.session, self.state.step
        bad = find_bad_rows(session.model, documents)
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
        check_rollbacks(spike, sum(amendment.until_step is not None for amendment in session.plan.amendments))
        rows = sorted({row for step in range(spike.first, spike.last + 1) for row in session.plan.steps[step].rows})
        amendment = Amendment(spike.first, tuple(rows), spike.reason, spike.last + 1)
        session.saver.forget()
        checkpoints.distrust_after(session.folder, spike.first)
        append_amendment(session.folder, amendment)  # last: killed before it, the run meets the same spike again
        session.plan = session.plan.amended(amendment)
        self.state = restore(session)
        journal(session, "rolled_back", step=self.state.step, rows=rows, reason=spike.reason)

    def go_back(self, error: WorkerWrong) -> None:
        """Return to the newest state before the steps with a wrong worker; repeat them without it."""
        session = self.session
        session.saver.forget()
        doubtful = checkpoints.distrust_after(session.folder, error.good)
        self.state = restore(session)
        journal(session, "distrusted", step=self.state.step, checkpoints=doubtful, reason=error.message)


class Feed:
    """The rows of each step, read by a thread one step ahead. Use it as a context."""

    def __init__(self, read: Callable[[int], list[Document]], num_steps: int):
        self._read, self._num_steps = read, num_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: dict[int, Future[list[Document]]] = {}

    def take(self, step: int) -> list[Document]:
        """Return the documents of `step`, and begin to read those of the step after it."""
        future = self._ahead.pop(step, None) or self._thread.submit(self._read, step)
        self._ahead = {step + 1: self._thread.submit(self._read, step + 1)} if step + 1 < self._num_steps else {}
        return future.result()

    def forget(self) -> None:
        """Drop the steps that were read ahead: the plan was amended, and they may be wrong."""
        self._ahead = {}

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


Repeat = Callable[[str, Callable[[], None]], None]
# The loss of good rows, that of bad answers (0 outside stage 2), and the gradient's norm.
NUM_REPORTED = 3


class StepAnswer:
    """The result of a step, on its way to the host."""

    def __init__(self, reported: Tensor):
        on_card = reported.device.type == "cuda"
        self._host_copy = torch.empty(reported.shape, dtype=reported.dtype, pin_memory=on_card)
        self._host_copy.copy_(reported, non_blocking=True)
        self._arrived = torch.cuda.current_stream(reported.device).record_event() if on_card else None

    def read(self) -> list[float]:
        """Return loss, loss of bad answers and norm. Waits for the step, and for nothing given out after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(self._host_copy.tolist())


class Updater:
    """The device's half of a step after the gradient: check, clipping and update.

    The check is made where the numbers are. A step whose loss or gradient is not finite changes nothing. Neither does
    any step that the device was given after it, until `go_on`. So the host may give out the next step before it has
    read what this one came to, and it finds the weights as they were before the bad one.

    `grad_N`: where a step leaves its gradient. `loss_scale`: what it was multiplied by for float16. `repeat`: of the
    model (protocol.py).
    """

    def __init__(
        self,
        grad_N: Tensor,
        optimizer: AdamW,
        *,
        clip: float,
        loss_scale: float = 1.0,
        repeat: Repeat = lambda name, work: work(),
    ):
        self._grad_N, self._optimizer, self._clip = grad_N, optimizer, clip
        self._loss_scale, self._repeat = loss_scale, repeat
        device = grad_N.device
        self._tokens = unwritten(1, dtype=torch.float64, device=device)
        self._reported = torch.zeros(NUM_REPORTED, dtype=torch.float64, device=device)
        self._sum, self._shrink = (torch.zeros((), dtype=torch.float64, device=device) for _ in "12")
        self._finite = torch.zeros((), dtype=torch.bool, device=device)
        self._ok = torch.ones((), dtype=torch.bool, device=device)

    def begin(self, *, rate: float, number: int, trained_tokens: int) -> None:
        """Copy to the device what `apply` reads: rate and number of the update, and the step's trained tokens."""
        self._optimizer.begin(rate=rate, number=number)
        to_device(self._tokens, (trained_tokens,))

    @torch.no_grad()
    def apply(self, losses: Tensor) -> None:
        """Update the weights. `losses` [1] or [2] are sums over the step. Waits for nothing and allocates nothing."""
        self._reported[: len(losses)].copy_(losses)
        self._repeat("update", self._update)

    def _update(self) -> None:
        norm = self._reported[NUM_REPORTED - 1]
        self._reported[: NUM_REPORTED - 1].div_(self._tokens)
        if self._loss_scale != 1:
            self._grad_N.div_(self._loss_scale)
        self._optimizer.norm(self._grad_N, norm)
        torch.sum(self._reported, 0, out=self._sum)
        torch.eq(self._sum.sub_(self._sum), 0, out=self._finite)  # inf - inf is not a number
        self._ok.logical_and_(self._finite)
        if self._clip > 0:  # the gradient as a whole, down to this norm
            torch.reciprocal(norm, out=self._shrink).mul_(self._clip).clamp_(max=1.0)
        self._optimizer.apply(self._grad_N, self._ok, self._shrink if self._clip > 0 else None)

    def answer(self) -> StepAnswer:
        """Begin to copy the step's losses and norm to the host."""
        return StepAnswer(self._reported)

    def go_on(self) -> None:
        """Let updates count again: the host knows of the step that was not finite."""
        self._ok.fill_(True)


def loss_scale_of(dtype: torch.dtype) -> float:
    """Return the factor of the loss.

    Gradients below 6e-8 are zero in float16; a power of two changes nothing else (arXiv:1710.03740).
    """
    return 1024.0 if dtype == torch.float16 else 1.0


if __name__ == "__main__":
    run_child(main, Train)
