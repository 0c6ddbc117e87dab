"""The training state: what its two files hold, and when it is saved.

The files are safetensors by PEFT parameter name, and JSON; never a pickle. run/checkpoints.py gets folders onto the
disk whole. Here is what they hold, that nothing non-finite is ever saved, and the thread that writes them beside the
loop.
"""

import json
import threading
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

from hivetune.base.disk import DISK, Disk, parse_json
from hivetune.base.journal import read_journal
from hivetune.base.typed import from_plain, to_plain
from hivetune.run import checkpoints
from hivetune.run.checkpoints import CHECKPOINT_EVERY_S, STATE, TENSORS, Files
from hivetune.run.folder import METRICS

_KINDS = ("param", "exp_avg", "exp_avg_sq")


class NotFinite(ArithmeticError):
    """Raised for a state that must not be saved; names the tensors."""


@dataclass(frozen=True)
class TrainState:
    """The state that must survive a death. Everything but the tensors is plain JSON.

    step: optimizer steps done, so training continues with `plan.steps[step]`. param, exp_avg, exp_avg_sq: fp32 by PEFT
    name. Saving copies nothing that is already on the CPU, so the caller passes tensors that stand still meanwhile.
    rng: the rule by which torch is seeded. schedule, loop: whatever the loop needs. best: {"step", "loss"} of the best
    validation.
    """

    step: int
    param: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]
    rng: Mapping[str, str]
    schedule: Mapping[str, Any]
    best: Mapping[str, Any] | None
    plan_sha256: str
    settings_hash: str
    loop: Mapping[str, Any]


def to_files(state: TrainState, buffer: bytearray | None = None) -> dict[str, bytes | memoryview]:
    """Return the two files of a checkpoint. Raises NotFinite naming the tensors that hold NaN or infinity.

    With `buffer` (kept by the caller between calls, grown here) the tensors' file is a view into it.
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
        "rng": state.rng,
        "schedule": state.schedule,
        "best": state.best,
        "plan_sha256": state.plan_sha256,
        "settings_hash": state.settings_hash,
        "loop": state.loop,
    }
    text = json.dumps(to_plain(plain), indent=1, sort_keys=True, allow_nan=False) + "\n"
    return {TENSORS: _serialise(tensors, bytearray() if buffer is None else buffer), STATE: text.encode()}


def from_files(files: Mapping[str, bytes | memoryview]) -> TrainState:
    """Return the state that `to_files` wrote.

    Raises ValueError for anything else, such as a tensor that is not finite or not fp32, or another JSON object.
    """
    try:
        plain = parse_json(bytes(files[STATE]), finite=True)
        schema = plain.pop("schema", None) if isinstance(plain, dict) else None
        if schema != 1:
            raise ValueError(f"schema {schema}, this Hivetune reads 1")
        state = from_plain(TrainState, {**plain, **{kind: {} for kind in _KINDS}})
    except ValueError as error:
        raise ValueError(f"{STATE}: {error}") from None
    try:
        tensors = safetensors.torch.load(bytes(files[TENSORS]))
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


def _serialise(tensors: Mapping[str, Tensor], buffer: bytearray) -> memoryview:
    """Write fp32 CPU tensors in the safetensors format, sorted by name, into `buffer`.

    The library's own `save` spends 0.4 s on 108 MB in fresh memory, this 0.02 s in used memory, and the loop stands
    still meanwhile. Equal tensors give equal bytes.
    """
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + 4 * tensors[name].numel()
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    size = 8 + len(text) + end
    if len(buffer) < size:
        buffer.extend(bytes(size - len(buffer)))
    view = memoryview(buffer)[:size]
    view[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
    whole = torch.frombuffer(view[8 + len(text) :], dtype=torch.float32)
    for name, described in header.items():
        start, stop = described["data_offsets"]
        whole[start // 4 : stop // 4].copy_(tensors[name].reshape(-1))
    return view


# After a save that failed (full disk), the next try; doubled each time.
_RETRY_S = 30.0
LONGEST_RETRY_S = 600.0


@dataclass(frozen=True)
class Saved:
    """One write that ended. `blocking_s`: how long the loop stood still; `error`: None, or why it failed."""

    step: int
    seconds: float
    blocking_s: float
    error: OSError | None


class Saver:
    """The thread that saves the state: the loop only copies it, the thread hashes and writes. One per run.

    The first checkpoint comes after this process's first step, so that each start gets on, and the next ones every
    `every_s`. Call `after_step` at every step, and `save` when the state must be on disk now (best validation, stop,
    end).
    """

    def __init__(
        self,
        run: Path,
        *,
        every_s: float = CHECKPOINT_EVERY_S,
        disk: Disk = DISK,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._every_s, self._disk, self._clock = run, every_s, disk, clock
        self._buffer = bytearray()
        self._thread: threading.Thread | None = None
        self._ended: list[Saved] = []
        self._began_at: float | None = None
        self._retry_s = 0.0

    def after_step(self, state: Callable[[], TrainState]) -> None:
        """Begin a write if one is due; `state` is called only then. Returns as soon as the state is copied.

        Raises NotFinite. A disk that fails does not stop training: see `ended`.
        """
        if self.due:
            self._begin(state())

    @property
    def due(self) -> bool:
        """Return whether a write is due now. A slow disk stretches the interval by itself."""
        if self._thread is not None and self._thread.is_alive():
            return False
        return self._began_at is None or self._clock() - self._began_at >= (self._retry_s or self._every_s)

    def save(self, state: TrainState) -> None:
        """Save before this returns. Raises OSError, NotFinite."""
        self.wait()
        self._begin(state)
        self.wait()
        error = self._ended[-1].error
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def release(self) -> None:
        """Free the memory of the copy, 12 bytes a trained parameter: no save follows for now."""
        self.wait()
        self._buffer = bytearray()

    def ended(self) -> list[Saved]:
        """Return the writes that ended since the last call, for the run's metrics."""
        ended, self._ended = self._ended, []
        return ended

    def _begin(self, state: TrainState) -> None:
        self._began_at = started = self._clock()
        files = to_files(state, self._buffer)
        arguments = (state.step, files, self._clock() - started)
        self._thread = threading.Thread(target=self._write, args=arguments, name="saver")
        self._thread.start()

    def _write(self, step: int, files: Files, blocking_s: float) -> None:
        started = self._clock()
        error = None
        try:
            checkpoints.commit_within(self._run, step, files, disk=self._disk)
        except OSError as problem:
            error = problem
        self._retry_s = min(max(_RETRY_S, 2 * self._retry_s), LONGEST_RETRY_S) if error else 0.0
        self._ended.append(Saved(step, self._clock() - started, blocking_s, error))
