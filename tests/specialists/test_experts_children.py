"""How many processes `hivetune experts` takes: to load torch is what it cost most, so one server loads it for all."""

import subprocess
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from specialists.planted import SHARED, config_of, domain

from hivetune.base.database import open_database
from hivetune.process import forkserver
from hivetune.release.registry import promote
from hivetune.serve.register import register_run
from hivetune.specialists.station import propose_specialists, train_specialists
from hivetune.train.start import open_run, train_run

pytestmark = pytest.mark.slow
ROWS = 300


def test_each_look_loads_torch_in_one_process(
    own_home: Path, no_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are counted, not seconds. Proposals: the screen, the control, a fork for each domain, one scoring. Then
    for each of two specialists its training, its export, its losses beside the base and beside the shared adapter, and
    those of its export's proof; the quantized base, and two scorings for the router."""
    counts = Counter[str]()

    class Started(subprocess.Popen[Any]):
        def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
            counts.update(["hivetune.process"] if "hivetune.process" in args else [])
            super().__init__(args, *rest, **options)

    class Forked(forkserver._Fork):
        def __init__(self, *details: Any) -> None:
            counts["forks"] += 1
            super().__init__(*details)

    rows = domain("coder", "brief", ROWS, cue="code") + domain("tester", "formal", ROWS, cue="test")
    config = config_of(tmp_path, rows)
    run = open_run(config.model_copy(update={"output": str(tmp_path / "shared")}), "shared")
    with forkserver.forking():
        train_run(run)
        release, _ = register_run(run.folder, SHARED)
    with closing(open_database()) as database:
        promote(database, release.label, by="test", reason="test", force=True)
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(forkserver, "_Fork", Forked)
    assert [step.step for step in propose_specialists(config).steps] == ["born", "born"]
    assert counts == {"hivetune.process": 1, "forks": 5}
    counts.clear()
    assert len(train_specialists(config).steps) == 2
    assert counts["hivetune.process"] == 1
    assert counts["forks"] <= 13
