"""Numbers that turned out wrong take their checkpoints with them: after a failed canary, and after a spike."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_run import make_run, supervise

pytestmark = pytest.mark.slow


def run_with(folder: Path, fault: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Events and metrics of a run of 80 steps that met `fault` and came to its end."""
    config = make_run(folder, 320, batch_size=4, supervise={"hang_floor_s": 60, "checkpoint_every_s": 0.01})
    (folder / "run/spoil.json").write_text(json.dumps({fault: True}))
    outcome = supervise(folder, config).check()
    assert outcome.steps == 80 and (folder / f"run/spoil.{fault}").exists()
    texts = [(folder / "run" / name).read_text() for name in ("events.jsonl", "metrics.jsonl")]
    events, metrics = ([json.loads(line) for line in text.splitlines()] for text in texts)
    losses = [entry["loss"] for entry in metrics if entry["event"] == "step"]
    assert len(losses) == 80 and all(math.isfinite(loss) for loss in losses if loss is not None)
    return events, metrics


def test_checkpoints_since_the_last_good_canary_are_set_aside(tmp_path: Path) -> None:
    events, _ = run_with(tmp_path, "canary")
    (failure,) = [entry for entry in events if entry["event"] == "failure"]
    assert failure["fault"] == "wrong-numbers" and failure["shape"] == [8, 412, 896]
    (distrusted,) = [entry for entry in events if entry["event"] == "distrusted"]
    assert distrusted["steps"]  # all since the start, where the last test had passed
    set_aside = {path.name for path in (tmp_path / "run/checkpoints").glob("*.distrusted")}
    assert set_aside == {f"{step:06d}.distrusted" for step in distrusted["steps"]}
    ends = [entry for entry in events if entry["event"] == "ended"]
    assert [entry["status"] for entry in ends] == ["failed", "done"]


def test_a_spike_is_rolled_back_and_its_window_left_out(tmp_path: Path) -> None:
    events, metrics = run_with(tmp_path, "diverge")
    assert [entry["status"] for entry in events if entry["event"] == "ended"] == ["done"]  # without a restart
    (back,) = [entry for entry in metrics if entry["event"] == "rolled_back"]
    assert back["step"] <= 40 and back["rows"]
    (window,) = [json.loads(line) for line in (tmp_path / "run/amendments.jsonl").read_text().splitlines()]
    assert window["from_step"] == 40 and window["until_step"] in (42, 44) and window["rows"] == back["rows"]
    losses = {entry["step"]: entry["loss"] for entry in metrics if entry["event"] == "step"}
    assert losses[41] is None  # the whole step is left out
    assert losses[80] < 1.2 * losses[40]
