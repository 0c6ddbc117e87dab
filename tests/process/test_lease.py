"""Leases of a card between processes: training goes first, and the kernel gives back what a dead process held."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hivetune.errors import Busy
from hivetune.process.lease import serve_on, train_on, training_on

CARD, OTHER = "cuda:7", "cuda:8"  # no test machine has so many


def holder(use: str) -> "subprocess.Popen[str]":
    """A process that took the card and sleeps; it has printed a line when it has the card."""
    code = f"from hivetune.process.lease import *; {use}({CARD!r}); print('mine', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process


def took(process: "subprocess.Popen[str]") -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == "mine\n"


def end(process: "subprocess.Popen[str]", number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


@pytest.mark.slow
def test_a_server_gets_no_card_that_is_trained_on_until_the_trainer_is_dead() -> None:
    trainer = holder("train_on")
    assert took(trainer) and training_on(CARD) and not training_on(OTHER)
    with pytest.raises(Busy, match="used for training"):
        serve_on(CARD)
    os.close(serve_on(OTHER))
    second = holder("train_on")  # several runs may share a card
    assert took(second)
    end(trainer)
    assert training_on(CARD)
    end(second)
    assert not training_on(CARD)
    os.close(serve_on(CARD))


@pytest.mark.slow
def test_a_trainer_waits_for_the_server_which_sees_it_and_lets_go() -> None:
    server = holder("serve_on")
    assert took(server)
    with pytest.raises(Busy, match="cuda:7 is still in use by the gateway or a chat after 0 s"):
        train_on(CARD, timeout_s=0.2)
    assert not training_on(CARD)  # who gave up wants nothing any more
    trainer = holder("train_on")
    while not training_on(CARD):
        assert trainer.poll() is None, "it ended before it waited"
        os.sched_yield()
    with pytest.raises(Busy):
        serve_on(CARD)  # no new server while a trainer waits
    end(server)  # killed: the kernel gives back what it held
    assert took(trainer)
    end(trainer)


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
