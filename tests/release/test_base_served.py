"""A base is converted and proven once, before its first training."""

import shutil
from pathlib import Path

import pytest
from serve.hive import MODEL, make_home

from hivetune.base.disk import home
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot
from hivetune.release import prove
from hivetune.release.prove import base_problem, unserved_base
from hivetune.train.open import Run
from hivetune.train.plan.steps import Plan


def new_run(model: Path, name: str) -> Run:
    config = RunConfig.model_validate({"model": name, "data": {"path": "rows.jsonl"}})
    return Run(home() / "new", config, model, Snapshot.__new__(Snapshot), Plan.__new__(Plan))


@pytest.mark.slow
def test_a_base_is_proven_once_before_the_first_training(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_home()
    assert base_problem(model) == ""  # nobody looked
    assert unserved_base(new_run(model, MODEL)) == ""
    monkeypatch.setattr(prove, "_base_problems", None)  # nothing is measured again
    assert unserved_base(new_run(model, MODEL)) == base_problem(model) == ""


@pytest.mark.slow
def test_a_base_that_llama_cpp_cant_serve_is_known_before_the_training(
    own_home: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its converter does not know this byte-level vocabulary. The reason is kept, and the evaluation reads it."""
    model = home() / "models" / "tiny"
    shutil.copytree(tiny_model_folder, model)
    for _ in range(2):
        found = unserved_base(new_run(model, "tiny"))
        assert "judged by its loss alone: llama.cpp's converter can't write this model" in found
        monkeypatch.setattr(prove, "_base_problems", None)
    assert "converter can't write this model" in base_problem(model)
