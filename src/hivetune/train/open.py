"""An existing run folder: its data, model and plan, opened for the steps that come after training."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import lock, problems_since_last_read
from hivetune.base.paths import quoted
from hivetune.base.private import check_owner
from hivetune.base.units import size
from hivetune.checkers import find_checker
from hivetune.config import EvalConfig, RunConfig
from hivetune.data.identity import identity_of, refuse_changed
from hivetune.data.snapshot import DAMAGED_SNAPSHOT, Snapshot, open_snapshot
from hivetune.errors import DoesNotFit, UsageError
from hivetune.machine.inventory import disk_free_bytes
from hivetune.models.sides import parse_side
from hivetune.run.folder import adapter_problems, has_adapter, read_record, read_resolved, write_resolved
from hivetune.train.plan.memory import TrainingSetup, disk_bytes
from hivetune.train.plan.steps import MIN_VOUCHED, Plan, PlanRow, make_plan, read_plan


@dataclass(frozen=True)
class Run:
    """An open run folder. `warning`: why llama.cpp can't serve its base, if training has just found out."""

    folder: Path
    config: RunConfig
    model: Path
    snapshot: Snapshot
    plan: Plan
    warning: str = ""

    @property
    def record(self) -> dict[str, Any]:
        return read_record(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """Return the document of `train --json` for a finished run, which may have been moved since."""
        return {**self.record["result"], "run": str(self.folder), "already_done": True}

    @property
    def is_finished(self) -> bool:
        """Return whether the run was trained to its end, and its adapter is unchanged since."""
        return self.record["status"] == "done" and has_adapter(self.folder) and not adapter_problems(self.folder)


def check_eval(config: EvalConfig) -> None:
    """Raise UsageError for a checker or baseline that no evaluation could use.

    Whether a side exists is found when it is opened.
    """
    if config.checker is not None:
        find_checker(config.checker, "eval.checker")
    parse_side(config.baseline, "eval.baseline")


def check_disk(folder: Path, setup: TrainingSetup) -> None:
    """Raise DoesNotFit if the disk of `folder` has too little space for a run."""
    # It can do without an export: that may go to another disk, and is refused there by itself.
    needed = sum(value for name, value in disk_bytes(setup).items() if name != "export")
    free = disk_free_bytes(folder)
    if free < needed:
        raise DoesNotFit(
            f"checkpoints and adapter need {size(needed)} of disk, and {size(free)} are free on the disk of {folder}",
            hint="free some space, or choose a folder on another disk: --set output=FOLDER",
        )


def load_run(folder: Path) -> Run:
    """Return an existing run.

    Raises UsageError if the folder is not a run or may belong to another user, if its snapshot or model is missing, or
    if one of them or the settings changed since the run began.
    """
    if folder.is_dir():
        check_owner(folder)
    record = read_record(folder)
    config, _ = read_resolved(folder)
    model = Path(record.get("model", "(not recorded)"))
    if not model.exists():
        raise UsageError(
            f"the base model of {folder} is missing: {model}",
            hint=f"get it again: hivetune fetch {quoted(config.model)}",
        )
    snapshot = open_snapshot(Path(record.get("snapshot", "(not recorded)")))
    for part, hint in ((model, f"hivetune fetch {quoted(config.model)}"), (snapshot.folder, DAMAGED_SNAPSHOT)):
        problems = problems_since_last_read(part)
        if problems:
            raise UsageError(f"a file that {folder} needs is damaged: {part / problems[0]}", hint=hint)
    if "identity" in record:
        refuse_changed(folder, record["identity"], identity_of(config, snapshot, model))
    return Run(folder, config, model, snapshot, read_plan(folder))


def with_workers(run: Run, workers: int | str | None) -> Run:
    """Return the run with another value of the setting `workers`; a finished run is returned unchanged.

    Raises Busy while another process trains it.
    """
    # No part of a run's identity: a cluster that does not answer any more must not be the run's for ever.
    if workers == run.config.workers or run.is_finished:
        return run
    with lock(run.folder):
        config, choices = read_resolved(run.folder)
        config = config.model_copy(update={"workers": workers})
        write_resolved(run.folder, config, choices)
    return replace(run, config=config)


# With fewer bad answers, or without validation rows to guard the good ones, nothing is learned from them.
MIN_BAD = 50


def plan_of(config: RunConfig, snapshot: Snapshot, settings_hash: str) -> Plan:
    """Return the plan of a config on a snapshot: the rows of each step."""
    bad = snapshot.bad_rows()
    if len(bad) < MIN_BAD or not snapshot.rows("validation"):
        bad = []
    return make_plan(
        [PlanRow(*row) for row in snapshot.plan_rows("train")],
        snapshot_hash=snapshot.hash,
        settings_hash=settings_hash,
        seed=config.seed,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
        chunk_rows=config.chunk_rows,
        good=snapshot.good_rows("train", MIN_VOUCHED) if bad else (),
        bad=bad,
    )
