"""Integer sums: the same whatever the order and the split, exact where they fit, and what does not fit is noticed.

Several ranks: supervise/test_workers.py.
"""

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train.worker.runs import learnable_rows, losses, make_run, run_bytes, run_training, stop_after

from hivetune.errors import MachineNotFit
from hivetune.process import launch
from hivetune.process.launch import reach_cluster
from hivetune.train.worker.exchange import (
    HEADROOM_BITS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    exponent_of,
    fits,
    to_gradient,
    to_integers,
)

# Far enough below the largest number of fp32 that no sum of twelve is infinite.
finite32 = st.floats(width=32, min_value=-(2.0**120), max_value=2.0**120)


def peak_of(values: torch.Tensor) -> float:
    return float(values.abs().max())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(finite32, min_size=3, max_size=3), min_size=1, max_size=12), st.randoms())
def test_any_order_and_any_split_give_the_same_bits(packs: list[list[float]], numbers) -> None:
    gradients = [torch.tensor(pack, dtype=torch.float32) for pack in packs]
    exponent = exponent_of(max(map(peak_of, gradients)), 0)
    integers = [to_integers(gradient, exponent) for gradient in gradients]
    straight = torch.stack(integers).sum(0)
    numbers.shuffle(integers)
    cut = numbers.randint(0, len(integers))
    parts = [torch.stack(part).sum(0) for part in (integers[cut:], integers[:cut]) if part]
    assert torch.equal(torch.stack(parts).sum(0), straight)
    found = to_gradient(straight, exponent, torch.float32)
    exact = [math.fsum(float(gradient[place]) for gradient in gradients) for place in range(3)]
    # A half of the grid's unit for each pack, then one rounding to fp32.
    unit = 2.0 ** (exponent - 45)
    for value, right in zip(found.tolist(), exact, strict=True):
        assert abs(value - right) <= len(packs) * unit / 2 + abs(right) * 2**-24


@given(st.floats(min_value=1e-20, max_value=1e30))
def test_values_near_the_largest_one_lose_nothing(largest: float) -> None:
    values = torch.tensor([largest, -largest / 3, largest * 2**-20], dtype=torch.float32)
    exponent = exponent_of(peak_of(values), 0)
    assert torch.equal(to_gradient(to_integers(values, exponent), exponent, torch.float32), values)


def test_a_gradient_above_the_headroom_does_not_fit_before_integers_overflow() -> None:
    for packs in (1, 4, 64):
        most = 2.0**HEADROOM_BITS / packs
        assert fits(most, 0, packs) and int(to_integers(torch.tensor([most]), 0)[0]) * packs < 2**63
        above = math.nextafter(most, math.inf)
        assert not fits(above, 0, packs) and fits(above, exponent_of(above, 0), packs)
    assert not fits(math.nan, 0, 1) and not fits(math.inf, 0, 1)


def test_the_grid_follows_the_largest_value_and_stays_where_fp32_can_reach_it() -> None:
    assert exponent_of(0.0, 7) == 7
    assert exponent_of(1e-45, 0) == MIN_EXPONENT and exponent_of(3e38, 0) == MAX_EXPONENT
    for exponent in (MIN_EXPONENT, MAX_EXPONENT):
        value = torch.tensor([2.0**exponent if exponent < 0 else 3e38])
        back = to_gradient(to_integers(value, exponent), exponent, torch.float32)
        assert torch.equal(back, value)


def test_packs_train_like_one_sum_and_resume_bit_for_bit(tiny_model_folder: Path, tmp_path: Path) -> None:
    """`workers` in one process: another rounding than without it, and law 4 as ever."""
    rows = learnable_rows(60)
    for name, workers in (("one", None), ("packs", 1), ("resumed", 1)):
        make_run(tmp_path / name, rows, workers=workers, choices={"pack_tokens": 32} if workers else {})
    for name in ("one", "packs"):
        run_training(tmp_path / name, tiny_model_folder)
    assert losses(tmp_path / "packs") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    run_training(tmp_path / "resumed", tiny_model_folder, on_beat=stop_after(5))
    run_training(tmp_path / "resumed", tiny_model_folder)
    assert run_bytes(tmp_path / "resumed") == run_bytes(tmp_path / "packs")


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """HOST:PORT of a program that gives this answer once."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            with closing(server.accept()[0]) as connection, suppress(ConnectionError):
                connection.sendall(answer)
                while connection.recv(4096):  # until the other side goes
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.0 505 HTTP Version Not Supported\r\n\r\n", "another program listens there"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "another program listens there"),
        (b"", "timed out"),
        (bytes((0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100)), ""),  # a head of Ray
    ],
)
def test_who_listens_is_asked_before_a_run_begins(answer: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "HEAD_ANSWERS_S", 0.2)
    with listening(answer) as head:
        if not words:
            assert reach_cluster(head) == "127.0.0.1"
            return
        with pytest.raises(MachineNotFit, match=words) as refused:
            reach_cluster(head)
    assert "docs/cluster.md" in refused.value.hint
