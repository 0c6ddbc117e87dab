"""Checkpoints: the content of their two files, when one is saved, the return of a run to one, and the adapter to keep.

The files are safetensors by PEFT parameter name, and JSON; never a pickle. run/checkpoints.py writes the folders so
that they are complete or absent. A value that is not finite is never saved. `main` saves the adapter of a run that
can't continue.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from hivetune.base.disk import parse_json
from hivetune.base.journal import read_journal
from hivetune.base.typed import from_plain, to_plain
from hivetune.errors import HivetuneError, UsageError
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat, Salvage
from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS
from hivetune.run.folder import METRICS, read_resolved
from hivetune.train.worker.model.adapter import base_name, begin, fill, same_views, write_adapter
from hivetune.train.worker.session import LoopState, Session, journal, open_events

# The weights, and the two averages of AdamW.
KINDS = ("param", "exp_avg", "exp_avg_sq")
# After a save that failed (full disk), the next try.
RETRY_S = 30.0
ANOTHER_FOLDER = "train into another folder: --set output=FOLDER"


class NotFinite(ArithmeticError):
    """Raised for a state with values that are not finite, which must not be saved; the message names the tensors."""


@dataclass(frozen=True)
class Checkpoint:
    """The state that is saved: a function of plan and step, without any clock, host or speed in it.

    tensors: KIND -> PEFT name -> fp32. The random generators are not part of it, because each step seeds them.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    plan_sha256: str
    settings_hash: str
    loop: LoopState


def checkpoint_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the two files of a checkpoint: equal bytes for equal states.

    Raises NotFinite that names the tensors with NaN or infinity.
    """
    tensors = {
        f"{kind}/{name}": tensor.detach().to("cpu", torch.float32).contiguous()
        for kind, named in checkpoint.tensors.items()
        for name, tensor in named.items()
    }
    step = checkpoint.loop.step
    if bad := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise NotFinite(f"step {step}: {len(bad)} of {len(tensors)} tensors are not finite, first {bad[0]}")
    whose = {"plan_sha256": checkpoint.plan_sha256, "settings_hash": checkpoint.settings_hash}
    # run/checkpoints.py reads `step` and `best` without this module, so they are at the top.
    plain = {"schema": 1, **whose, **to_plain(checkpoint.loop)}
    text = json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n"
    return {TENSORS: safetensors.torch.save(tensors), STATE: text.encode()}


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, without allocating a temporary of the tensor's size."""
    # A finite sum has finite terms; a sum that is not finite may have overflowed.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def load(folder: Path, kinds: Sequence[str] = KINDS) -> Checkpoint:
    """Return the state in a checkpoint folder, with the tensors of `kinds` only.

    Raises UsageError for a damaged checkpoint, and for one that another version wrote.
    """
    try:
        if problems := checkpoints.problems_of(folder):
            raise ValueError("; ".join(problems))
        plain = parse_json((folder / STATE).read_bytes(), finite=True)
        if plain.pop("schema") != 1:
            raise ValueError("another version of Hivetune wrote it")
        tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        # Of the adapter alone, because the optimizer's tensors would take 8 bytes a weight beside the model.
        with safetensors.safe_open(folder / TENSORS, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                kind, _, name = key.partition("/")
                if kind in tensors:
                    tensors[kind][name] = file.get_tensor(key)
        whose = plain.pop("plan_sha256"), plain.pop("settings_hash")
        return Checkpoint(tensors, *whose, from_plain(LoopState, plain))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"{folder}: {error}", hint=ANOTHER_FOLDER) from None


def load_newest_good(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact state (None: start at step 0), and in words the problems of newer checkpoints."""
    newest = checkpoints.newest_good(run)
    problems = list(newest.damaged.values())
    if newest.damaged:
        lost = max(newest.damaged)
        problems.append(
            f"{lost - newest.step} steps are repeated: training continues from step {newest.step} instead of {lost}"
        )
    return None if newest.folder is None else load(newest.folder), problems


def save(session: Session, *, only_when_due: bool = False) -> None:
    """Save a checkpoint of the current state and write it to the journal. Raises OSError and NotFinite.

    `only_when_due`: save only if the interval has passed. An error of the disk is then only written to the journal.
    """
    if only_when_due and not (session.ranks.is_first and time.monotonic() >= session.save_due_s):
        return
    session.heartbeat.beat(Beat.SAVING)
    if not session.ranks.is_first:
        return
    started, step, plan = time.perf_counter(), session.state.step, session.plan
    tensors = {kind: same_views(flat_N, session.model.adapter) for kind, flat_N in _flat_state(session).items()}
    files = checkpoint_files(Checkpoint(tensors, plan.sha256, plan.settings_hash, session.state))
    # The loop waits meanwhile: 0.1 s in ten minutes on a usual disk (decision 0144).
    session.save_due_s = time.monotonic() + RETRY_S
    try:
        checkpoints.commit_within(session.folder, step, files)
    except OSError as error:
        journal(session, "save_failed", step=step, started=started, error=str(error))
        if only_when_due:
            return
        raise
    session.save_due_s = time.monotonic() + session.save_every_s
    journal(session, "saved", step=step, started=started)


def restore(session: Session) -> None:
    """Restore weights, optimizer and state of the newest intact checkpoint, or the initial ones; delete later metrics.

    Rank 0 reads them and sends them to the others. Raises UsageError for a checkpoint of another plan.
    """
    state = _read_checkpoint(session) if session.ranks.is_first else LoopState()
    session.state = session.ranks.agree(state, LoopState, _flat_state(session).values())
    open_events(session)
    # The supervisor reads here which step a worker died in, and which path it took.
    step, path = session.state.step, session.model.path
    journal(session, "started", step=step, path=path, pid=os.getpid(), ranks=session.ranks.size)
    if session.ranks.note:
        journal(session, "problem", step=step, text=session.ranks.note)


def _read_checkpoint(session: Session) -> LoopState:
    adapter, plan = session.model.adapter, session.plan
    saved, problems = load_newest_good(session.folder)
    state = LoopState() if saved is None else saved.loop
    if saved is None:
        begin(adapter, session.config.lora, session.config.seed, session.model_folder)
        # After a rollback to the start they hold the averages of the steps that are made again.
        session.optimizer.exp_avg_N.zero_()
        session.optimizer.exp_avg_sq_N.zero_()
    else:
        where = checkpoints.folder_of(session.folder, state.step)
        if (saved.plan_sha256, saved.settings_hash) != (plan.sha256, plan.settings_hash):
            raise UsageError(f"{where} belongs to a run with another plan", hint=ANOTHER_FOLDER)
        for kind, flat_N in _flat_state(session).items():
            fill(same_views(flat_N, adapter), saved.tensors[kind], f"{where}: {kind}")
    entries = list(read_journal(session.folder / METRICS))
    remaining = [entry for entry in entries if entry.get("step", 0) <= state.step]
    if len(remaining) < len(entries):  # measurements of steps that are made again
        session.metrics.replace(remaining)
    for problem in problems:
        journal(session, "problem", step=state.step, text=problem)
    return state


def _flat_state(session: Session) -> dict[str, Tensor]:
    optimizer = session.optimizer
    return dict(zip(KINDS, (session.model.master_N, optimizer.exp_avg_N, optimizer.exp_avg_sq_N), strict=True))


def best_adapter(run: Path, last: Mapping[str, Tensor], state: LoopState) -> tuple[Mapping[str, Tensor], int, str]:
    """Return the adapter to keep and its step: the best by validation, else `last`, which belongs to `state`.

    The third value is the reason why the best one can't be used, "" if it is used.
    """
    if state.best is not None and state.best["step"] != state.step:
        try:
            best = load(checkpoints.folder_of(run, state.best["step"]), ("param",))
        except UsageError as error:
            return last, state.step, f"the best step can't be read, the last is kept: {error.message}"
        return best.tensors["param"], best.loop.step, ""
    return last, state.step, ""


def keep_best(session: Session) -> tuple[Mapping[str, Tensor], int]:
    """Return the adapter to keep if the run ended now, and its step; journal it if the best one can't be read."""
    adapter, step, problem = best_adapter(session.folder, session.model.adapter, session.state)
    if problem:
        journal(session, "problem", step=session.state.step, text=problem)
    return adapter, step


def main(task: Salvage, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write the adapter of a run that can't continue: the best by validation, else the last.

    It works without the base model's weights and without a device. Raises HivetuneError without a good checkpoint.
    """
    config, _ = read_resolved(task.run)
    saved, problems = load_newest_good(task.run)
    if saved is None:
        raise HivetuneError(
            f"{task.run} has no good checkpoint: {'; '.join(problems) or 'none was committed'}", hint=ANOTHER_FOLDER
        )
    adapter, step, problem = best_adapter(task.run, saved.tensors["param"], saved.loop)
    write_adapter(task.run, adapter, config.lora, *base_name(task.model))
    return {"adapter_step": step, "problems": [*problems, *filter(None, [problem])]}
