"""The leases of graphics cards, in which training has precedence over serving. The CPU needs none.

Each side has a lock file per card in `leases/` of the home. It holds a shared lock while it uses the card or waits for
it, and checks the other side's file. A trainer takes its lock and then waits until no server holds the card. A server
takes its lock, and releases it at once if there is a trainer. So the trainer wins if both come at the same moment. Any
number of trainers, or of servers, share a card. The kernel drops the locks of a dead process.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Literal

from hivetune.base.disk import home
from hivetune.base.private import make_folder, open_plain
from hivetune.errors import Busy

Use = Literal["training", "serving"]

FREE_TIMEOUT_S = 180.0  # a server first finishes its answers
_POLL_S = 0.1
# A check holds the lock for some microseconds, and two checks must not take each other for a holder.
_CHECKS, _BETWEEN_CHECKS_S = 3, 0.005


def card_name(device: str) -> str:
    """Return the card `device` as cuda:N with the number that the driver gives it.

    torch's own numbers differ between processes that see different cards, so leases use the driver's number.
    """
    number = int(device.partition(":")[2] or 0)
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = [entry.strip() for entry in os.environ.get(variable, "").split(",") if entry.strip()]
        if number < len(visible):
            return f"cuda:{visible[number]}"
    return f"cuda:{number}"


# `device` is the name in this process's own environment: "cuda", "cuda:1".


def training_on(device: str) -> bool:
    """Return whether a process trains on the card or waits for it."""
    return _is_in_use(device, "training")


def train_on(device: str, timeout_s: float = FREE_TIMEOUT_S) -> int:
    """Wait until no server uses the card, and return the lock's descriptor, to be held while training.

    Raise Busy after `timeout_s`.
    """
    lock = _hold(device, "training")
    deadline = time.monotonic() + timeout_s
    while _is_in_use(device, "serving"):
        if time.monotonic() > deadline:
            os.close(lock)
            raise Busy(
                f"{device} is still in use by the gateway or a chat after {timeout_s:.0f} s",
                hint="stop the gateway or the chat that uses it, or train with device: cpu",
            )
        time.sleep(_POLL_S)
    return lock


def serve_on(device: str) -> int:
    """Return the descriptor of the lock to hold while serving with the card. Raise Busy if a run trains on it."""
    lock = _hold(device, "serving")
    if training_on(device):
        os.close(lock)
        raise Busy(f"a training run uses {device}", hint="wait until the run ends: hivetune runs")
    return lock


def _path(device: str, use: Use) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in card_name(device))
    return home() / "leases" / f"{name}.{use}"


def _hold(device: str, use: Use) -> int:
    path = _path(device, use)
    make_folder(path.parent)
    lock = open_plain(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_SH)  # waits at most for a check
    return lock


def _is_in_use(device: str, use: Use) -> bool:
    path = _path(device, use)
    if not path.exists():
        return False
    look = open_plain(path, os.O_RDWR)
    with contextlib.closing(os.fdopen(look, "r+b")):
        for _ in range(_CHECKS):
            try:
                fcntl.flock(look, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except BlockingIOError:
                time.sleep(_BETWEEN_CHECKS_S)
    return True
