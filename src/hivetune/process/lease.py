"""Who uses a card: training has precedence over serving, told by locks that the kernel drops when a process dies.

Each side holds a shared lock of its own file per card, in `leases/` of the home, as long as it uses the card or waits
for it; and looks whether the other side's file is held. A trainer raises its lock first and then waits until no server
holds the card. A server raises its lock, looks for a trainer, and if there is one lets go at once: so of two that come
in the same moment the trainer gets the card. Any number of trainers, or of servers, share one. A CPU needs no lease.

Whether somebody waits for an answer now is told in the same way, so that a trainer on the same machine can stand still.
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

Use = Literal["training", "serving", "answering"]
_REQUESTS = "requests"  # what is answered, in the place of a card

FREE_TIMEOUT_S = 180.0  # a server ends its running answers first
_POLL_S = 0.1
# A look holds the lock itself for some microseconds; two that look at once must not take each other for a holder.
_LOOKS, _BETWEEN_LOOKS_S = 3, 0.005


def card_name(index: int = 0) -> str:
    """cuda:N of a card as its driver counts: the index is that among the cards which this process may see."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        seen = [entry.strip() for entry in os.environ.get(variable, "").split(",") if entry.strip()]
        if index < len(seen):
            return f"cuda:{seen[index]}"
    return f"cuda:{index}"


def training_on(device: str) -> bool:
    """Whether a process trains on the card now, or waits for it."""
    return _is_held(device, "training")


def train_on(device: str, timeout_s: float = FREE_TIMEOUT_S) -> int:
    """Take the card for training: the lock's descriptor, held until it is closed or the process ends. Waits until no
    server uses the card. Raises Busy after `timeout_s`."""
    lock = _hold(device, "training")
    deadline = time.monotonic() + timeout_s
    while _is_held(device, "serving"):
        if time.monotonic() > deadline:
            os.close(lock)
            raise Busy(
                f"{device} is still used for serving after {timeout_s:.0f} s",
                hint="stop the gateway or the chat that uses it, or train with device: cpu",
            )
        time.sleep(_POLL_S)
    return lock


def serve_on(device: str) -> int:
    """Take the card for serving: the lock's descriptor, to be inherited by the process that uses the card. Raises Busy
    while a process trains on it."""
    lock = _hold(device, "serving")
    if training_on(device):
        os.close(lock)
        raise Busy(f"{device} is used for training", hint="it is free when the run ends: hivetune runs")
    return lock


class Answering:
    """Entered by each request of a gateway while it is open: one lock for all of them, by one thread."""

    def __init__(self) -> None:
        self._open, self._lock = 0, -1

    def __enter__(self) -> None:
        if not self._open:
            self._lock = _hold(_REQUESTS, "answering")
        self._open += 1

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        if not self._open:
            os.close(self._lock)


def somebody_waits() -> bool:
    """Whether a gateway of this home answers a request now."""
    return _is_held(_REQUESTS, "answering")


def _path(device: str, use: Use) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in device)
    return home() / "leases" / f"{name}.{use}"


def _hold(device: str, use: Use) -> int:
    path = _path(device, use)
    make_folder(path.parent)
    lock = open_plain(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_SH)  # waits for nothing longer than a look
    return lock


def _is_held(device: str, use: Use) -> bool:
    path = _path(device, use)
    if not path.exists():
        return False
    look = open_plain(path, os.O_RDWR)
    with contextlib.closing(os.fdopen(look, "r+b")):
        for _ in range(_LOOKS):
            try:
                fcntl.flock(look, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except BlockingIOError:
                time.sleep(_BETWEEN_LOOKS_S)
    return True
