"""Leases of a card: training goes first, and the kernel gives back what a dead process held.

A lock belongs to its descriptor, so two of one process meet as those of two processes do.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hivetune.errors import Busy
from hivetune.process.lease import serve_on, train_on, training_on

CARD, OTHER = "cuda:7", "cuda:8"  # no test machine has so many


def test_a_server_gets_no_card_while_anybody_trains_on_it() -> None:
    trainers = [train_on(CARD), train_on(CARD)]  # several runs may share a card
    for trainer in trainers:
        assert training_on(CARD) and not training_on(OTHER)
        with pytest.raises(Busy, match="a training run uses"):
            serve_on(CARD)
        os.close(serve_on(OTHER))
        os.close(trainer)
    assert not training_on(CARD)
    os.close(serve_on(CARD))


def test_a_trainer_waits_for_the_server_which_sees_it_and_lets_go() -> None:
    server = serve_on(CARD)
    with pytest.raises(Busy, match="cuda:7 is still in use by the gateway or a chat after 0 s"):
        train_on(CARD, timeout_s=0.2)
    assert not training_on(CARD)  # who gave up wants nothing any more
    waiting = threading.Thread(target=lambda: os.close(train_on(CARD)))
    waiting.start()
    while not training_on(CARD):
        assert waiting.is_alive(), "it ended before it waited"
        os.sched_yield()
    with pytest.raises(Busy):
        serve_on(CARD)  # no new server while a trainer waits
    os.close(server)
    waiting.join(10)
    assert not waiting.is_alive()


def test_the_lease_is_inherited_and_lives_as_long_as_its_last_holder(own_home: Path) -> None:
    lock = serve_on(CARD)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    with pytest.raises(Busy):
        train_on(CARD, timeout_s=0)
    child.kill()
    child.communicate()
    os.close(train_on(CARD, timeout_s=0))
    assert {path.name for path in (own_home / "leases").iterdir()} == {"cuda-7.serving", "cuda-7.training"}


def test_one_card_has_one_lease_whatever_a_process_calls_it(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUDA_VISIBLE_DEVICES=1 a trainer leased cuda:1 and the server cuda:0, so they never met."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    lock = train_on("cuda:0")
    for name in ("cuda", "cuda:0"):
        assert training_on(name)
        with pytest.raises(Busy):
            serve_on(name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert training_on("cuda:1") and not training_on("cuda:0")
    os.close(lock)
