"""The training state: what its two files hold, when it is saved, and the adapter that a run keeps of it.

The files are safetensors by PEFT parameter name, and JSON; never a pickle. run/checkpoints.py gets folders onto the
disk whole. Here is what they hold, and that nothing non-finite is ever saved. `main` salvages the adapter of a run that
can't continue.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from hivetune.errors import HivetuneError
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Salvage
from hivetune.run import checkpoints
from hivetune.run.checkpoints import CHECKPOINT_EVERY_S, STATE, TENSORS
from hivetune.run.folder import METRICS, read_resolved
from hivetune.train.worker.model.adapter import base_name, write_adapter

_KINDS = ("param", "exp_avg", "exp_avg_sq")


class NotFinite(ArithmeticError):
    """Raised for a state that must not be saved; names the tensors."""


@dataclass(frozen=True)
class TrainState:
    """The state that must survive a death. Everything but the tensors is plain JSON.

    step: optimizer steps done, so training continues with `plan.steps[step]`. param, exp_avg, exp_avg_sq: fp32 by PEFT
    name. best: {"step", "loss"} of the best validation. loop: whatever else the loop needs. The generators of random
    numbers are no part of it: each step seeds them.
    """

    step: int
    param: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]
    best: Mapping[str, Any] | None
    plan_sha256: str
    settings_hash: str
    loop: Mapping[str, Any]


def to_files(state: TrainState) -> dict[str, bytes]:
    """Return the two files of a checkpoint: equal bytes for equal states.

    Raises NotFinite naming the tensors that hold NaN or infinity.
    """
    tensors = {
        f"{kind}/{name}": tensor.detach().to("cpu", torch.float32).contiguous()
        for kind in _KINDS
        for name, tensor in getattr(state, kind).items()
    }
    bad = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if bad:
        raise NotFinite(f"step {state.step}: {len(bad)} of {len(tensors)} tensors are not finite, first {bad[0]}")
    plain = {
        "schema": 1,
        "step": state.step,
        "best": state.best,
        "plan_sha256": state.plan_sha256,
        "settings_hash": state.settings_hash,
        "loop": state.loop,
    }
    text = json.dumps(to_plain(plain), indent=1, sort_keys=True, allow_nan=False) + "\n"
    return {TENSORS: safetensors.torch.save(tensors), STATE: text.encode()}


def load(folder: Path, kinds: Sequence[str] = _KINDS) -> TrainState:
    """Return the state in one checkpoint folder; of other tensors than `kinds` nothing is read.

    The optimizer's would take 24 bytes a parameter beside the model. Raises ValueError (with the problem) or OSError.
    """
    if problems := checkpoints.problems_of(folder):
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    tensors: dict[str, Any] = {kind: {} for kind in _KINDS}
    try:
        plain = parse_json((folder / STATE).read_bytes(), finite=True)
        schema = plain.pop("schema", None) if isinstance(plain, dict) else None
        if schema != 1:
            raise ValueError(f"schema {schema}, this Hivetune reads 1")
        state = from_plain(TrainState, {**plain, **tensors})
        with safetensors.safe_open(folder / TENSORS, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                kind, _, name = key.partition("/")
                if kind not in tensors:
                    raise ValueError(f"{key} is unknown")
                if kind in kinds:
                    tensor = tensors[kind][name] = file.get_tensor(key)
                    if tensor.dtype != torch.float32 or not is_finite(tensor):
                        raise ValueError(f"{key} is not finite, or not float32")
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: {error}") from None
    if f"{state.step:06d}" != folder.name:
        raise ValueError(f"{folder}: holds step {state.step}")
    return replace(state, **tensors)


def kept_adapter(
    run: Path, last: Mapping[str, Tensor], step: int, best: Mapping[str, Any] | None
) -> tuple[Mapping[str, Tensor], int, str]:
    """Return the adapter that a run keeps and its step: the best by validation, else the `last`, which is of `step`.

    The third value says in words why the best one can't be kept, "" where it can.
    """
    if best is not None and best["step"] != step:
        try:
            return load(checkpoints.folder_of(run, best["step"]), ("param",)).param, best["step"], ""
        except (OSError, ValueError) as error:
            return last, step, f"the best step can't be read, the last is kept: {error}"
    return last, step, ""


def load_newest_good(run: Path) -> tuple[TrainState | None, list[str]]:
    """Return the newest state that can be read whole (None: start at step 0), and in words what was passed over.

    A damaged checkpoint is passed over, and the one before it is used.
    """
    problems: list[str] = []
    newest_step, at_most, state = 0, None, None
    while state is None:
        newest = checkpoints.newest_good(run, at_most=at_most)
        problems += [str(damage) for damage in newest.damaged]
        newest_step = max([newest_step, newest.step, *(damage.step for damage in newest.damaged)])
        if newest.folder is None:
            break
        try:
            state = load(newest.folder)
        except ValueError as error:  # the hashes are right and the content is not: written so, or of another format
            problems.append(f"checkpoint {newest.step} is passed over: {error}")
            at_most = newest.step - 1
    step = 0 if state is None else state.step
    newest_saved = _newest_saved(run)
    if newest_saved > newest_step and not list((run / checkpoints.FOLDER).glob(f"{newest_saved:06d}*")):
        problems.append(f"checkpoint {newest_saved} was saved and is missing now")
        newest_step = newest_saved
    if newest_step > step:
        problems.append(
            f"{newest_step - step} steps are repeated: training continues from step {step} instead of {newest_step}"
        )
    return state, problems


def _newest_saved(run: Path) -> int:
    """Return the newest step that metrics.jsonl reports as saved, so that a folder which vanished is reported."""
    saved = [e["step"] for e in read_journal(run / METRICS) if e["event"] == "saved"]
    return max(saved, default=0)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, without a temporary of the tensor's size.

    A finite sum has finite terms; a sum that is not finite may have overflowed.
    """
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


# After a save that failed (full disk), the next try.
RETRY_S = 30.0


class Saver:
    """Saves the state when that is due. The loop stands still meanwhile: 0.1 s in ten minutes on a usual disk.

    The first checkpoint comes after this process's first step, so that each start gets on, and the next ones `every_s`
    after the last one ended.
    """

    def __init__(self, run: Path, *, every_s: float = CHECKPOINT_EVERY_S, clock: Callable[[], float] = time.monotonic):
        self._run, self._every_s, self._clock = run, every_s, clock
        self._next_at = -math.inf

    @property
    def due(self) -> bool:
        """Return whether a save is due now."""
        return self._clock() >= self._next_at

    def save(self, state: TrainState) -> None:
        """Save before this returns. Raises OSError, after which the next save is due sooner; NotFinite."""
        files = to_files(state)
        self._next_at = self._clock() + RETRY_S
        checkpoints.commit_within(self._run, state.step, files)
        self._next_at = self._clock() + self._every_s


def main(task: Salvage, heartbeat: Heartbeat) -> dict[str, Any]:
    """Write the adapter of a run that can't continue: the best by validation, else the last.

    It works without the base model's weights and without a device. Raises HivetuneError without a good checkpoint.
    """
    run = task.run
    config, _ = read_resolved(run)
    state, problems = load_newest_good(run)
    if state is None:
        raise HivetuneError(
            f"{run} has no good checkpoint: {'; '.join(problems) or 'none was committed'}",
            hint="train it again in another folder: --set output=FOLDER",
        )
    adapter, step, problem = kept_adapter(run, state.param, state.step, state.best)
    write_adapter(run, adapter, config.lora, *base_name(task.model))
    return {"adapter_step": step, "problems": [*problems, *filter(None, [problem])]}
