"""The open run of a worker: its data, model and optimizer, and the journal of its metrics. The loop is in loop.py.

Shapes: N all adapter weights.
"""

import importlib.util
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hivetune.base.journal import Journal
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import HivetuneError, UsageError
from hivetune.process.child import Heartbeat
from hivetune.process.launch import supervision
from hivetune.process.protocol import Beat, Train
from hivetune.run.choices import Choices
from hivetune.run.figures import TENSORBOARD, point_of
from hivetune.run.folder import METRICS, read_resolved
from hivetune.train.plan.steps import Plan, read_plan, stratified_sample
from hivetune.train.worker.check import check_products
from hivetune.train.worker.exchange import FIRST_EXPONENT, Exchange, open_exchange, open_ranks
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel
from hivetune.train.worker.ranks import Ranks
from hivetune.train.worker.settle import apply_choices, settle, with_recovery_changes
from hivetune.train.worker.watch import LossHistory, Scored, score_rows

VALIDATIONS = 10  # in a run
# The most rows of a validation. More would cost more than they tell: the verdict has rows of its own (`eval`).
VALIDATION_ROWS = 48
# The first tokens of a row stand for its kind: rows of one agent have its system prompt in common.
KIND_TOKENS = 32
# Between two tests of the device's products. When one fails, all that was trained since the last one is doubtful.
CANARY_EVERY_S = 600.0


class StepNotFinite(HivetuneError):
    """Raised for a loss or gradient that is not finite, if no single row is the cause. No weight was updated."""


class AdamW:
    """torch's fused AdamW (arXiv:1711.05101) of `master_N`, with access to its two averages for checkpoints."""

    # Its state is a function of weights, averages and the number of updates, so a checkpoint needs nothing else.
    def __init__(self, master_N: Tensor, grad_N: Tensor, *, weight_decay: float):
        self.exp_avg_N, self.exp_avg_sq_N = torch.zeros_like(master_N), torch.zeros_like(master_N)
        self._step = torch.zeros((), dtype=torch.float32, device=master_N.device)
        master_N.grad = grad_N
        self._adamw = torch.optim.AdamW([master_N], weight_decay=weight_decay, fused=True)
        self._adamw.state[master_N] = {
            "step": self._step,
            "exp_avg": self.exp_avg_N,
            "exp_avg_sq": self.exp_avg_sq_N,
        }

    def update(self, *, rate: float, number: int) -> None:
        """Apply one AdamW update at learning rate `rate`. `number` counts updates from 1, for the bias correction."""
        self._adamw.param_groups[0]["lr"] = rate
        self._step.fill_(number - 1)
        self._adamw.step()


def learning_rate(config: RunConfig, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`: linear warm-up to the peak, then the schedule to 0."""
    warmup = warmup_steps(config.warmup, steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if config.lr_schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_schedule == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate


def warmup_steps(warmup: float, steps: int) -> int:
    """Return the number of warm-up steps, at most `steps`: a `warmup` below 1 is a share, else a number."""
    return min(steps, math.ceil(warmup * steps) if warmup < 1 else round(warmup))


@dataclass(frozen=True)
class LoopState:
    """The state of the loop after `step` optimizer steps. It is part of every checkpoint.

    best: {"step", "loss"} of the best validation. grid: the exponent of the next step's rounding unit, if ranks add
    integers. start_loss, reference: the loss of the validation rows, and the nll of each bad answer and of each better
    answer, at the start of the lessons; None before that.
    """

    step: int = 0
    updates: int = 0
    best: dict[str, Any] | None = None
    without_gain: int = 0
    stopped_early: bool = False
    start_loss: float | None = None
    reference: tuple[tuple[int, float], ...] | None = None
    history: LossHistory = field(default_factory=LossHistory)
    grid: int = FIRST_EXPONENT


@dataclass
class Session:
    """A run as its worker has it open. `plan` and `state` are replaced when they change.

    ranks: this process among the run's ranks. Ranks above 0 have a folder of their own, without checkpoints.
    sample_rows: the validation rows that are scored. The last two fields are times of time.monotonic, in seconds.
    """

    folder: Path
    model_folder: Path
    config: RunConfig
    plan: Plan
    snapshot: Snapshot
    model: LoraModel
    optimizer: AdamW
    metrics: Journal
    events: Any
    """torch's SummaryWriter of TensorBoard's event files, None where the config does not ask for them."""
    ranks: Ranks
    exchange: Exchange
    heartbeat: Heartbeat
    sample_rows: Sequence[int]
    save_every_s: float
    state: LoopState = field(default_factory=LoopState)
    # At once after the first step, so that each start of a worker gets on, however soon it dies.
    save_due_s: float = -math.inf
    products_tested_s: float = -math.inf

    @property
    def num_steps(self) -> int:
        return len(self.plan.step_ends)

    @property
    def validate_every(self) -> int:
        """Return the steps between two validations: ten in a run, but at most about a tenth of its time."""
        if self.config.validate_every is not None:
            return self.config.validate_every
        # A row costs a third in validation of what it costs in training (no backward pass): 0.1 is 10 / 3 of the rows.
        cheap_enough = math.ceil(10 / 3 * len(self.sample_rows) / self.config.batch_size)
        return min(self.num_steps, max(1, math.ceil(self.num_steps / VALIDATIONS), cheap_enough))


def open_session(task: Train, heartbeat: Heartbeat) -> Session:
    """Open all that a run needs. Raises UsageError when plan and snapshot do not belong together."""
    folder = task.run
    config, choices = read_resolved(folder)
    heartbeat.beat(Beat.PREPARING)
    plan, snapshot = read_plan(folder), open_snapshot(task.snapshot)
    if snapshot.hash != plan.snapshot_hash:
        raise UsageError(f"the plan of {folder} does not belong to its snapshot", hint="train into another folder")
    # Rank 0 chooses for all. The others get the result, so no rank computes otherwise than the journal says.
    if task.rank is None:
        choices = settle(folder, config, choices, task.model, plan, snapshot)
    ranks = open_ranks(task, config.cluster, choices)
    choices = with_recovery_changes(config, ranks.agree(choices, Choices), task.changes)
    device, dtype = apply_choices(choices, config.memory_share)
    model = load_model(task.model, config.lora, method=config.method, dtype=dtype, device=device, choices=choices)

    def kind(row: int) -> tuple[bytes, int]:
        return snapshot.tokens(row)[:KIND_TOKENS].tobytes(), snapshot.num_trained(row)

    return Session(
        folder=folder,
        model_folder=task.model,
        config=config,
        plan=plan,
        snapshot=snapshot,
        model=model,
        optimizer=AdamW(model.master_N, model.grad_N, weight_decay=config.weight_decay),
        metrics=Journal(folder / METRICS),
        events=None,
        ranks=ranks,
        exchange=open_exchange(config, choices, model, ranks),
        heartbeat=heartbeat,
        sample_rows=stratified_sample(snapshot.rows("validation"), VALIDATION_ROWS, kind),
        save_every_s=supervision().checkpoint_every_s or task.checkpoint_every_s,
    )


def score_validation_sample(session: Session) -> Scored:
    """Score the validation rows with the model's current adapter, and journal it.

    Raises StepNotFinite when no loss is finite.
    """
    started, step = time.perf_counter(), session.state.step
    scored = score_rows(
        session.exchange.nll,
        session.snapshot,
        session.sample_rows,
        beat=lambda: session.heartbeat.beat(Beat.VALIDATING),
    )
    if scored is None:
        raise StepNotFinite(f"step {step}: the loss of every validation row is not finite")
    journal(session, "validation", step=step, started=started, **asdict(scored))
    return scored


def run_canary(session: Session, *, every_s: float = CANARY_EVERY_S) -> None:
    """Test matrix products at the run's shapes, if the last test was `every_s` seconds ago. Raises CanaryFailed."""
    if time.monotonic() - session.products_tested_s < every_s:
        return
    started = time.perf_counter()
    products = check_products(session.model)
    session.products_tested_s = time.monotonic()
    # The supervisor reads here at which step they last passed: when they fail, it distrusts the checkpoints after it.
    journal(session, "canary", step=session.state.step, passed=True, products=products, started=started)


def journal(session: Session, event: str, *, started: float | None = None, **fields: Any) -> None:
    """Append a line to metrics.jsonl, and its figures to TensorBoard's. `started` (perf_counter) becomes `seconds`."""
    if started is not None:
        fields["seconds"] = round(time.perf_counter() - started, 6)
    line = session.metrics.append(event, **fields)
    point = None if session.events is None else point_of(line)
    if point is not None:
        for name, value in point.values.items():
            session.events.add_scalar(name, value, point.step, point.time_s)


def open_events(session: Session) -> None:
    """Begin TensorBoard's event files below the run (`report_to: [tensorboard]`), where its package is installed."""
    if session.events is not None:
        session.events.close()
    is_asked = session.ranks.is_first and TENSORBOARD in session.config.report_to
    if is_asked and importlib.util.find_spec("tensorboard") is not None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        # A resumed run continues them: readers drop what they hold from this step on.
        session.events = SummaryWriter(str(session.folder / TENSORBOARD), purge_step=session.state.step + 1)
