"""A run whose frozen layers are streamed: the bytes of one whose layers stay, across a stop and a change on the way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from train.worker.models import describe, write_model
from train.worker.runs import learnable_rows, make_run, run_bytes, run_training, stop_after

from hivetune.models.architecture import read_architecture
from hivetune.run.folder import read_resolved
from hivetune.train.plan.device import Device
from hivetune.train.plan.memory import TrainingSetup, predict_peak

QUICK = {"threads": 1, "kernels": "torch"}
LAYERS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return describe(write_model(tmp_path_factory.mktemp("streamed"), num_hidden_layers=LAYERS))


def trained(folder: Path, model: Path, *, stop_at: int | None = None, then: dict[str, Any] | None = None) -> None:
    """The run of `folder`, stopped once and taken up again with other choices if so said."""
    if stop_at is not None:
        assert run_training(folder, model, on_beat=stop_after(stop_at))["status"] == "stopped"
        resolved = yaml.safe_load((folder / "run/config.resolved.yaml").read_text())
        resolved["choices"] |= then or {}
        (folder / "run/config.resolved.yaml").write_text(yaml.safe_dump(resolved))
    assert run_training(folder, model)["status"] == "done"


def test_the_same_adapter_whether_streamed_stopped_or_both(tmp_path: Path, model: Path) -> None:
    """The ladder may begin to stream in the middle of a run: nothing shows it but the memory."""
    found = []
    for name, streamed, stop_at, then in (
        ("whole", None, None, None),
        ("streamed", LAYERS, None, None),
        ("stopped", 4, 3, None),
        ("changed", None, 2, {"streamed": LAYERS}),
    ):
        choices = QUICK | ({"streamed": streamed} if streamed else {})
        make_run(tmp_path / name, learnable_rows(40), choices=choices, epochs=2, lora={"r": 4, "dropout": 0.1})
        trained(tmp_path / name, model, stop_at=stop_at, then=then)
        found.append(run_bytes(tmp_path / name))
    assert found[0].keys() == found[1].keys()
    assert all(one == found[0] for one in found[1:])


def test_a_run_that_does_not_fit_whole_is_streamed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, learnable_rows(40), choices={**QUICK, "products": "torch"}, epochs=1)
    architecture = read_architecture(model)
    setup = TrainingSetup(architecture, architecture.adapter_parameters(4), "float32", recompute=LAYERS, rank=4)
    limit = predict_peak(replace(setup, streamed=LAYERS), 64).bytes + 100
    monkeypatch.setattr(Device, "limit_bytes", lambda *_: limit)
    result = run_training(tmp_path, model)
    choices = read_resolved(tmp_path / "run")[1]
    assert (choices.streamed, choices.recompute) == (LAYERS, LAYERS)
    assert result["path"] == "fast" and result["rate"]["flops_per_s"] > 0
