"""An open run: its folder, plan, snapshot and model, and how it is restored, journaled, saved and finished.

The loop is in loop.py.
"""

import contextlib
import functools
import importlib.util
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hivetune.base.journal import Journal, read_journal
from hivetune.base.typed import from_plain
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import DataRefused, HivetuneError, UsageError
from hivetune.models.architecture import read_architecture
from hivetune.process.child import Heartbeat
from hivetune.process.launch import supervision
from hivetune.process.protocol import Beat, Train
from hivetune.run import checkpoints
from hivetune.run.choices import Choices
from hivetune.run.figures import TENSORBOARD, point_of
from hivetune.run.folder import METRICS, ROW_LOSSES, read_resolved
from hivetune.train.plan.choose import micro_batch_shapes, rate_key, step_flops
from hivetune.train.plan.layout import trim_rows
from hivetune.train.plan.memory import setup_of_run
from hivetune.train.plan.steps import Plan, read_plan
from hivetune.train.worker.check import check_products
from hivetune.train.worker.checkpoint import Saver, TrainState, kept_adapter, load_newest_good
from hivetune.train.worker.device import default_threads, peak_memory_bytes, start_with, with_changes, with_threads
from hivetune.train.worker.exchange.exchange import Exchange, open_exchange, open_ranks, with_packs
from hivetune.train.worker.exchange.grid import FIRST_EXPONENT
from hivetune.train.worker.exchange.ranks import Ranks
from hivetune.train.worker.model.adapter import base_name, begin, fill, is_as_begun, same_views, write_adapter
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel
from hivetune.train.worker.optimizer import AdamW
from hivetune.train.worker.settle import refuse_full_memory, settle
from hivetune.train.worker.watch import LossHistory, Scored, choose_sample, score_rows

VALIDATIONS = 10
VALIDATION_ROWS = 48  # the most of a validation during training
# The steps from which a run's rate is taken.
STEPS_RATED = 50
# Between two tests of the device's products: all since the last one is doubtful when they fail.
CANARY_EVERY_S = 600.0


class StepNotFinite(HivetuneError):
    """Raised for a loss or gradient that is not finite and not the fault of single rows. Nothing was updated."""


class BaseNotFinite(StepNotFinite):
    """Raised before the first update, when the adapter is zero and too many rows fail: it is the base model."""


@dataclass(frozen=True)
class LoopState:
    """All that the loop knows after `step` optimizer steps. It is part of every checkpoint.

    `grid`: the exponent of the next step's integers, where workers add them.
    """

    step: int = 0
    updates: int = 0
    best: dict[str, Any] | None = None
    without_gain: int = 0
    stopped_early: bool = False
    start_loss: float | None = None
    """The loss of the validation rows when the lessons began; None before that."""
    history: LossHistory = field(default_factory=LossHistory)
    grid: int = FIRST_EXPONENT


@dataclass
class Session:
    """A run as its worker has it open. `plan` is replaced by its amended self, `state` by that of the newest step."""

    folder: Path
    model_folder: Path
    config: RunConfig
    plan: Plan
    snapshot: Snapshot
    model: LoraModel
    optimizer: AdamW
    saver: Saver
    metrics: Journal
    event_files: "EventFiles"
    row_losses: Journal
    ranks: Ranks
    """This process among the run's ranks. Those above 0 have a folder of their own, without checkpoints."""
    exchange: Exchange
    heartbeat: Heartbeat
    validation_rows: Sequence[int]
    sample_rows: Sequence[int]
    """The validation rows that are scored during the run."""
    state: LoopState = field(default_factory=LoopState)
    reference: Mapping[int, float] | None = None
    """Row -> nll of bad answers and of those that they are compared with, when the lessons began."""
    products_tested: float = -math.inf
    """When the device's products were tested last, on time.monotonic's clock."""

    @property
    def num_steps(self) -> int:
        return len(self.plan.step_ends)

    @property
    def validate_every(self) -> int:
        """Return the steps between two validations: ten in a run, but at most about a tenth of the training's time.

        A row costs a third in validation of what it costs in training (no backward pass), so 0.1 is 10 / 3 of the rows
        that are validated.
        """
        if self.config.validate_every is not None:
            return self.config.validate_every
        cheap_enough = math.ceil(10 / 3 * len(self.sample_rows) / self.config.batch_size)
        return min(self.num_steps, max(1, math.ceil(self.num_steps / VALIDATIONS), cheap_enough))


def open_session(task: Train, heartbeat: Heartbeat) -> Session:
    """Open all that a run needs. Raises UsageError when plan, snapshot and checkpoints do not belong together."""
    folder = task.run
    config, choices = read_resolved(folder)
    heartbeat.beat(Beat.PREPARING)
    plan = read_plan(folder)
    snapshot = open_snapshot(task.snapshot)
    if snapshot.hash != plan.snapshot_hash:
        raise UsageError(f"the plan of {folder} was made for other data", hint="train into another folder")
    ranks = open_ranks(task, config, with_threads(config, choices).threads or default_threads())
    if ranks.is_first:
        choices = settle(folder, config, with_packs(config, choices, snapshot), task.model, plan, snapshot)
    choices = with_changes(config, ranks.agree(choices, Choices), task.changes)
    device, dtype = start_with(choices, config.memory_share)
    if not checkpoints.steps(folder):  # a run that began is not ended by what other programs hold
        refuse_full_memory(choices)
    model = load_model(task.model, config.lora, method=config.method, dtype=dtype, device=device, choices=choices)
    validation_rows = snapshot.rows("validation")
    return Session(
        folder=folder,
        model_folder=task.model,
        config=config,
        plan=plan,
        snapshot=snapshot,
        model=model,
        optimizer=AdamW(model.master_N, model.grad_N, weight_decay=config.weight_decay),
        saver=Saver(folder, every_s=supervision().checkpoint_every_s or task.checkpoint_every_s),
        metrics=Journal(folder / METRICS),
        event_files=EventFiles(folder, config.report_to if ranks.is_first else []),
        row_losses=Journal(folder / ROW_LOSSES),
        ranks=ranks,
        exchange=open_exchange(config, choices, model, ranks),
        heartbeat=heartbeat,
        validation_rows=validation_rows,
        sample_rows=choose_sample(snapshot, validation_rows, VALIDATION_ROWS),
    )


def restore(session: Session) -> None:
    """Restore weights, optimizer and state of the newest good checkpoint, or of the start; drop later metrics.

    Rank 0 reads them and sends them to the others.
    """
    state = _read_checkpoint(session) if session.ranks.is_first else LoopState()
    session.state = session.ranks.agree(state, LoopState, _flat_state(session).values())
    # The supervisor reads here which step a worker died in, and which path it took.
    step, path = session.state.step, session.model.path
    journal(session, "started", step=step, path=path, pid=os.getpid(), ranks=session.ranks.size)
    if session.ranks.note:
        journal(session, "problem", step=step, text=session.ranks.note)


def _read_checkpoint(session: Session) -> LoopState:
    begin(session.model.adapter, session.config.lora, session.config.seed, session.model_folder)
    session.optimizer.exp_avg_N.zero_()
    session.optimizer.exp_avg_sq_N.zero_()
    saved, problems = load_newest_good(session.folder)
    state = LoopState()
    if saved is not None:
        if (saved.plan_sha256, saved.settings_hash) != (session.plan.sha256, session.plan.settings_hash):
            raise UsageError(
                f"the checkpoints of {session.folder} belong to another plan", hint="train into another folder"
            )
        where = checkpoints.folder_of(session.folder, saved.step)
        for kind, flat_N in _flat_state(session).items():
            fill(same_views(flat_N, session.model.adapter), getattr(saved, kind), f"{where}: {kind}")
        state = from_plain(LoopState, {**saved.loop, "step": saved.step, "best": saved.best})
    _take_back(session.metrics, session.folder / METRICS, state.step)
    _take_back(session.row_losses, session.folder / ROW_LOSSES, state.step)
    session.event_files.begin(state.step)
    for problem in problems:
        journal(session, "problem", step=state.step, text=problem)
    return state


def _take_back(journal: Journal, path: Path, step: int) -> None:
    """Remove the measurements after `step`: these steps are repeated. Other processes use the same journal."""
    entries = list(read_journal(path))
    remaining = [entry for entry in entries if entry.get("step", 0) <= step]
    if len(remaining) < len(entries):
        journal.replace(remaining)


def score_held_out(session: Session, rows: Sequence[int], event: str = "validation", step: int | None = None) -> Scored:
    """Score validation rows with the model's current adapter and journal it; `step`: the adapter's, if not the newest.

    Raises StepNotFinite when no loss is finite.
    """
    started, of, step = time.perf_counter(), len(session.validation_rows), session.state.step if step is None else step
    beat = functools.partial(session.heartbeat.beat, Beat.VALIDATING)
    scored, nll = score_rows(session.exchange.nll, session.snapshot, rows, of, beat)
    if scored is None:
        raise StepNotFinite(f"step {step}: the loss of every validation row is not finite")
    session.row_losses.append(event, step=step, rows=list(nll), nll=[round(value, 6) for value in nll.values()])
    journal(session, event, step=step, started=started, **asdict(scored))
    return scored


def run_canary(session: Session, *, every_s: float = CANARY_EVERY_S) -> None:
    """Test products at the run's own shapes, if the last test was `every_s` ago. Raises CanaryFailed.

    The supervisor reads in the journal at which step they last passed: when they fail, checkpoints after it are
    doubtful.
    """
    if time.monotonic() - session.products_tested < every_s:
        return
    started = time.perf_counter()
    products = check_products(session.model)
    session.products_tested = time.monotonic()
    journal(session, "canary", step=session.state.step, passed=True, products=products, started=started)


def save(session: Session, *, only_when_due: bool = False) -> None:
    """Save and journal it. Raises OSError: what must not be lost can't be kept.

    `only_when_due`: a disk that fails does not stop training: it is journaled, and tried again later.
    """
    if only_when_due and not (session.ranks.is_first and session.saver.due):
        return
    session.heartbeat.beat(Beat.SAVING)
    if not session.ranks.is_first:
        return
    started, step = time.perf_counter(), session.state.step
    try:
        session.saver.save(_state_to_save(session))
    except OSError as error:
        journal(session, "save_failed", step=step, started=started, error=str(error))
        if only_when_due:
            return
        raise
    journal(session, "saved", step=step, started=started)


def _state_to_save(session: Session) -> TrainState:
    """Return the state for a checkpoint.

    It holds nothing that differs between two runs of one plan: no clock, host or speed.
    """
    loop = asdict(session.state)
    flat = _flat_state(session)
    return TrainState(
        step=loop.pop("step"),
        **{kind: same_views(flat_N, session.model.adapter) for kind, flat_N in flat.items()},
        best=loop.pop("best"),
        plan_sha256=session.plan.sha256,
        settings_hash=session.plan.settings_hash,
        loop=loop,
    )


def _flat_state(session: Session) -> dict[str, Tensor]:
    optimizer = session.optimizer
    return {"param": session.model.master_N, "exp_avg": optimizer.exp_avg_N, "exp_avg_sq": optimizer.exp_avg_sq_N}


def journal(session: Session, event: str, *, started: float | None = None, **fields: Any) -> None:
    """Append one line to metrics.jsonl. `started` (of perf_counter) becomes `seconds`."""
    if started is not None:
        fields["seconds"] = round(time.perf_counter() - started, 6)
    session.metrics.append(event, **fields)
    session.event_files.write(event, time.time(), fields)


class EventFiles:
    """The figures of a run as TensorBoard's own event files below the run (`report_to: [tensorboard]`).

    A resumed run continues them: readers drop the steps that are made again. Nothing is written where `tensorboard` is
    not among the targets or its package is not installed, and nothing more after an error: a full disk stops the
    figures, never the run.
    """

    def __init__(self, run: Path, targets: list[Any]):
        self._folder = run / TENSORBOARD
        self._wanted = "tensorboard" in targets and importlib.util.find_spec("tensorboard") is not None
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Begin a file after `step` finished steps."""
        self.close()
        if self._wanted:
            with self._until_an_error():
                from torch.utils.tensorboard import SummaryWriter  # takes a second

                self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def write(self, event: str, time_s: float, fields: Mapping[str, Any]) -> None:
        """Write the values of one line of metrics.jsonl."""
        point = point_of({**fields, "event": event, "time": time_s})
        if self._writer is not None and point is not None:
            with self._until_an_error():
                for name, value in point.values.items():
                    self._writer.add_scalar(name, value, point.step, point.time_s)

    def close(self) -> None:
        """Write the rest."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._until_an_error():
                writer.close()

    @contextlib.contextmanager
    def _until_an_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._writer, self._wanted = None, False


def keep_best(session: Session) -> tuple[Mapping[str, Tensor], int]:
    """Return the adapter that the run would keep now, and its step; journal where the best can't be read."""
    state = session.state
    adapter, step, problem = kept_adapter(session.folder, session.model.adapter, state.step, state.best)
    if problem:
        journal(session, "problem", step=state.step, text=problem)
    return adapter, step


def finish(session: Session) -> dict[str, Any]:
    """Save, write the adapter (the best by validation, else the last), and return the run's result.

    Raises StepNotFinite for an adapter that is still what it was at the start after updates were made, and DataRefused
    when the plan ended and none of its rows could be trained: neither is a success.
    """
    run_canary(session, every_s=0)
    save(session)
    state, model, is_first = session.state, session.model, session.ranks.is_first
    is_done = state.stopped_early or state.step == session.num_steps
    if is_done and not state.updates:
        raise DataRefused(
            f"{session.folder}: nothing was trained, every row was quarantined", hint="see amendments.jsonl"
        )
    adapter_step = state.step
    if state.updates and is_first:
        if is_as_begun(model.adapter, session.config.lora):
            raise StepNotFinite(f"after {state.updates} updates the adapter is what it was at the start")
        adapter, adapter_step = keep_best(session)
        write_adapter(session.folder, adapter, session.config.lora, *base_name(session.model_folder))
    whole = None
    if is_done and len(session.sample_rows) < len(session.validation_rows):
        if is_first:
            fill(model.adapter, dict(adapter), "the adapter that is kept")
        adapter_step = session.ranks.agree(adapter_step, int, [model.master_N])
        whole = score_held_out(session, session.validation_rows, "held_out", adapter_step)
    for written in (session.row_losses, session.metrics, session.event_files):
        written.close()
    if not is_first:
        return {"steps": state.step}
    metrics = list(read_journal(session.folder / METRICS))
    return {
        "status": "done" if is_done else "stopped",
        "steps": state.step,
        "steps_planned": session.num_steps,
        "stopped_early": state.stopped_early,
        "best": state.best,
        "held_out": None if whole is None else {"loss": whole.loss, "rows": whole.rows},
        "adapter_step": adapter_step if state.updates else None,
        "adapter_weights": model.master_N.numel(),
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
    """Return the operations a second of the run's steps after the first, which warms up, and its key for the plan.

    None for several ranks: what the plan predicts from is the rate of one.
    """
    steps = [entry for entry in metrics if entry["event"] == "step" and entry["loss"] is not None][1:][:STEPS_RATED]
    if not steps or session.ranks.size > 1:
        return None
    config, choices = read_resolved(session.folder)
    kind = "cpu" if session.model.device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
    setup = replace(
        setup_of_run(config, read_architecture(session.model_folder), choices, kind), path=session.model.path
    )
    flops = sum(
        step_flops(setup, shape)
        for entry in steps
        for shape in micro_batch_shapes(
            setup, trim_rows(session.snapshot, session.plan.steps[entry["step"] - 1].rows), choices.budget_tokens or 0
        )
    )
    return {"key": rate_key(setup), "flops_per_s": flops / sum(entry["seconds"] for entry in steps)}


def _totals(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return sums over all valid steps, from any process of the run."""
    steps = [entry for entry in metrics if entry["event"] == "step" and entry["loss"] is not None]
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
