"""Packs summed as integers: one process, ranks of torchrun, stopped and resumed, give the same bits."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from train.worker.runs import learnable_rows, losses, make_run, run_bytes, run_training, stop_after

from hivetune.base.disk import sha256_bytes
from hivetune.errors import UsageError
from hivetune.process.child import Ranks, read_ranks


def test_the_environment_of_torchrun(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_ranks({}) == Ranks(0, 1)
    assert read_ranks({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "x", "LOCAL_RANK": "0"}) == Ranks(0, 1)
    with pytest.raises(UsageError, match="MASTER_ADDR, MASTER_PORT is not set"):
        read_ranks({"WORLD_SIZE": "2", "RANK": "1"})
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert read_ranks({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", **meeting}) == Ranks(1, 2, 1)
    for torn, why in (
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE=-2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2", "RANK": "one", **meeting}, "RANK=one"),
        ({"WORLD_SIZE": "2", "RANK": "2", **meeting}, "RANK is 2"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "x", **meeting}, "LOCAL_RANK=x"),
    ):
        with pytest.raises(UsageError, match=why):
            read_ranks(torn)
    make_run(tmp_path, learnable_rows(20))
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="a run of one process"):
        run_training(tmp_path, tiny_model_folder)


def test_packs_train_like_one_sum_and_resume_bit_for_bit(tiny_model_folder: Path, tmp_path: Path) -> None:
    """`workers` with dropout, in one process: another rounding than without it, and law 4 as ever."""
    rows = learnable_rows(60)
    for name, workers in (("one", None), ("packs", 1), ("resumed", 1)):
        settings = {"workers": workers, "choices": {"pack_tokens": 32} if workers else {}}
        make_run(tmp_path / name, rows, **settings)
    for name in ("one", "packs"):
        run_training(tmp_path / name, tiny_model_folder)
    assert losses(tmp_path / "packs") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    run_training(tmp_path / "resumed", tiny_model_folder, on_beat=stop_after(5))
    run_training(tmp_path / "resumed", tiny_model_folder)
    assert run_bytes(tmp_path / "resumed") == run_bytes(tmp_path / "packs")


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_the_same_bits_as_one_process(tiny_model_folder: Path, tmp_path: Path) -> None:
    rows = learnable_rows(60)
    for name in ("one", "two"):
        make_run(tmp_path / name, rows, workers="auto", choices={"pack_tokens": 32}, lora={"r": 4, "dropout": 0.1})
    run_training(tmp_path / "one", tiny_model_folder)
    run_ranks(tmp_path / "two", tiny_model_folder, 2)
    assert run_bytes(tmp_path / "two") == run_bytes(tmp_path / "one")


@pytest.mark.proof
def test_one_to_four_ranks_train_the_same_bits(
    tiny_model_folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rows = learnable_rows(60)
    hashes = set()
    for ranks in (1, 2, 3, 4):
        folder = tmp_path / str(ranks)
        make_run(folder, rows, workers=ranks, choices={"pack_tokens": 32}, lora={"r": 4, "dropout": 0.1})
        run_ranks(folder, tiny_model_folder, ranks)
        hashes.add(sha256_bytes((folder / "run/adapter_model.safetensors").read_bytes()))
    assert len(hashes) == 1
    record_property("ranks of torchrun with one adapter hash", "1, 2, 3, 4")


def run_ranks(folder: Path, model: Path, ranks: int) -> None:
    import subprocess
    import sys

    from hivetune.process.protocol import Train, write_task

    run = folder / "run"
    task = write_task(Train(run, model, folder / "snapshot"), run)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command += ["-m", "hivetune.train.worker.loop", str(task)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
