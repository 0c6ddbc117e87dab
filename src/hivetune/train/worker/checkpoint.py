"""The training state: what its two files hold, and when it is saved.

The files are safetensors by PEFT parameter name, and JSON; never a pickle. run/checkpoints.py gets folders onto the
disk whole. Here is what they hold, and that nothing non-finite is ever saved.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
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
from hivetune.run import checkpoints
from hivetune.run.checkpoints import CHECKPOINT_EVERY_S, STATE, TENSORS
from hivetune.run.folder import METRICS

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


def from_files(files: Mapping[str, bytes]) -> TrainState:
    """Return the state that `to_files` wrote.

    Raises ValueError for anything else, such as a tensor that is not finite or not fp32, or another JSON object.
    """
    try:
        plain = parse_json(files[STATE], finite=True)
        schema = plain.pop("schema", None) if isinstance(plain, dict) else None
        if schema != 1:
            raise ValueError(f"schema {schema}, this Hivetune reads 1")
        state = from_plain(TrainState, {**plain, **{kind: {} for kind in _KINDS}})
    except ValueError as error:
        raise ValueError(f"{STATE}: {error}") from None
    try:
        tensors = safetensors.torch.load(files[TENSORS])
    except SafetensorError as error:
        raise ValueError(f"{TENSORS}: {error}") from error
    by_kind: dict[str, Any] = {kind: {} for kind in _KINDS}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind not in by_kind:
            raise ValueError(f"{TENSORS}: {key} is unknown")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{TENSORS}: {key} is {str(tensor.dtype).removeprefix('torch.')}, not float32")
        if not is_finite(tensor):
            raise ValueError(f"{TENSORS}: {key} is not finite")
        by_kind[kind][name] = tensor
    if not by_kind["param"].keys() == by_kind["exp_avg"].keys() == by_kind["exp_avg_sq"].keys():
        raise ValueError(f"{TENSORS}: parameters and optimizer state name different tensors")
    return replace(state, **by_kind)


def load(folder: Path) -> TrainState:
    """Return the state in one checkpoint folder. Raises ValueError (with the problem) or OSError."""
    problems = checkpoints.problems_of(folder)
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    state = from_files({name: (folder / name).read_bytes() for name in (TENSORS, STATE)})
    if f"{state.step:06d}" != folder.name:
        raise ValueError(f"{folder}: holds step {state.step}")
    return state


def load_parameters(folder: Path) -> dict[str, Tensor]:
    """Return the adapter in one checkpoint folder, without the optimizer's state. Raises as `load`."""
    if problems := checkpoints.problems_of(folder):
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    prefix = "param/"
    try:
        with safetensors.safe_open(folder / TENSORS, framework="pt") as file:
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (it is no mapping)
            tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{folder / TENSORS}: {error}") from error
    if bad := [name for name, tensor in tensors.items() if tensor.dtype != torch.float32 or not is_finite(tensor)]:
        raise ValueError(f"{folder / TENSORS}: {bad[0]} is not finite, or not float32")
    return tensors


def kept_adapter(
    run: Path, last: Mapping[str, Tensor], step: int, best: Mapping[str, Any] | None
) -> tuple[Mapping[str, Tensor], int, str]:
    """Return the adapter that a run keeps and its step: the best by validation, else the `last`, which is of `step`.

    The third value says in words why the best one can't be kept, "" where it can.
    """
    if best is not None and best["step"] != step:
        try:
            return load_parameters(checkpoints.folder_of(run, best["step"])), best["step"], ""
        except (OSError, ValueError) as error:
            return last, step, f"the best step can't be read, the last is kept: {error}"
    return last, step, ""


def load_newest_good(
    run: Path, *, check: Callable[[TrainState], object] = lambda state: None
) -> tuple[TrainState | None, list[str]]:
    """Return the newest state that can be read whole (None: start at step 0), and in words what was passed over.

    A damaged checkpoint is passed over, and the one before it is used. So is one that `check` refuses with ValueError.
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
            loaded = load(newest.folder)
            check(loaded)
            state = loaded
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


# After a save that failed (full disk), the next try; doubled each time.
_RETRY_S = 30.0
LONGEST_RETRY_S = 600.0


class Saver:
    """Saves the state when that is due. The loop stands still meanwhile: 0.1 s in ten minutes on a usual disk.

    The first checkpoint comes after this process's first step, so that each start gets on, and the next ones `every_s`
    after the last one ended.
    """

    def __init__(
        self,
        run: Path,
        *,
        every_s: float = CHECKPOINT_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._every_s, self._clock = run, every_s, clock
        self._next_at = -math.inf
        self._retry_s = 0.0

    @property
    def due(self) -> bool:
        """Return whether a save is due now."""
        return self._clock() >= self._next_at

    def save(self, state: TrainState) -> None:
        """Save before this returns. Raises OSError, after which the next save is due sooner; NotFinite."""
        files = to_files(state)
        try:
            checkpoints.commit_within(self._run, state.step, files)
        except OSError:
            self._retry_s = min(max(_RETRY_S, 2 * self._retry_s), LONGEST_RETRY_S)
            self._next_at = self._clock() + self._retry_s
            raise
        self._retry_s = 0.0
        self._next_at = self._clock() + self._every_s
