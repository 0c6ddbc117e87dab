"""Scores are what the models say: the losses of both on each row, and a model that is scored once."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.runs import learnable_rows, make_run, run_training

from hivetune.data.snapshot import open_snapshot
from hivetune.judge.worker import score
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Score
from hivetune.run.choices import Choices
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.general import load_general
from hivetune.train.worker.model.protocol import read_documents

pytestmark = pytest.mark.slow  # models answer

ROWS = (9, 19, 29, 39, 49)


def test_losses_are_computed_without_transformers() -> None:
    """Its import takes 3.5 s of processor time, for each evaluation and each start of a worker."""
    script = "import sys, hivetune.judge.worker.score, hivetune.train.worker.loop; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.fixture(scope="module")
def trained(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    make_run(folder, learnable_rows(80), epochs=4)
    run_training(folder, tiny_model_folder)
    return folder


def run_score(folder: Path, model: Path, out: Path, rows: tuple[int, ...] = ROWS) -> list[dict[str, Any]]:
    out.mkdir(exist_ok=True)
    scores = out / "scores.jsonl"
    score.main(Score(model, folder / "run", folder / "snapshot", scores, rows), Heartbeat(None))
    return [json.loads(line) for line in scores.read_text().splitlines()]


def test_losses_of_base_and_tuned(trained: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    lines = run_score(trained, tiny_model_folder, tmp_path / "score")
    documents = read_documents(open_snapshot(trained / "snapshot"), ROWS)
    lora, tensors = read_adapter(trained / "run")
    model = load_general(
        tiny_model_folder,
        lora,
        method="lora",
        dtype=torch.float32,
        device=torch.device("cpu"),
        choices=Choices(),
        why="",
    )
    fill(model.adapter, tensors, "run")
    sums = {}
    for side in ("base", "tuned"):
        found = {line["row"]: line for line in lines if (line["model"] == "base") == (side == "base")}
        expected = model.nll(documents, adapter=side == "tuned").tolist()
        assert [found[d.row]["nll"] for d in documents] == pytest.approx(expected, rel=1e-5)
        assert [found[d.row]["tokens"] for d in documents] == [int(d.trained_L.sum()) for d in documents]
        sums[side] = math.fsum(expected)
    assert sums["tuned"] < sums["base"]


def test_a_model_that_is_scored_is_not_scored_again(trained: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    """One line of the adapter is torn: the base's losses stay, and the adapter's are computed anew."""
    whole = run_score(trained, tiny_model_folder, tmp_path / "score")
    file = tmp_path / "score" / "scores.jsonl"
    file.write_text(file.read_text()[:-9])
    again = [line for line in run_score(trained, tiny_model_folder, tmp_path / "score") if "nll" in line]
    assert [line["model"] == "base" for line in again].count(True) == 5 and len(again) == 5 + 4 + 5
    assert again[:9] == whole[:9] and [line["nll"] for line in again[9:]] == [line["nll"] for line in whole[5:]]


def test_a_loss_that_is_not_finite_is_null(trained: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    from hivetune.train.worker.model.fast.model import FastModel

    def nll(self: Any, documents: list[Any], *, adapter: bool) -> torch.Tensor:
        return torch.tensor([math.nan if adapter else 1.0] * len(documents))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastModel, "nll", nll)
        lines = run_score(trained, tiny_model_folder, tmp_path / "score")
    assert [line["nll"] for line in lines if line["model"] != "base"] == [None] * 5
    assert [line["nll"] for line in lines if line["model"] == "base"] == [1.0] * 5
