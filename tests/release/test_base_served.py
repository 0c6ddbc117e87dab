"""A base is converted and proven once, before its first training; a run in a copied home is the original's."""

import shutil
from pathlib import Path

import pytest
from serve.hive import MODEL, make_home

from hivetune.base.disk import MANIFEST, home, write_json, write_manifest
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot
from hivetune.errors import HivetuneError, UsageError
from hivetune.release import prove
from hivetune.release.export import export_run
from hivetune.release.prove import base_problem, ensure_base_served, unserved_base
from hivetune.train.open import Run
from hivetune.train.plan.steps import Plan


@pytest.mark.slow
def test_a_base_is_proven_once(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_home()
    assert base_problem(model) == ""
    ensure_base_served(MODEL, model)
    monkeypatch.setattr(prove, "_base_problems", None)  # nothing is measured again
    ensure_base_served(MODEL, model)
    assert base_problem(model) == ""


@pytest.mark.slow
def test_a_base_that_llama_cpp_cant_serve_is_known_before_the_training(
    own_home: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its converter does not know this byte-level vocabulary. The reason is kept, and the evaluation reads it."""
    model = home() / "models" / "tiny"
    shutil.copytree(tiny_model_folder, model)
    for _ in range(2):
        with pytest.raises(HivetuneError, match="converter can't write this model"):
            ensure_base_served("tiny", model)
        monkeypatch.setattr(prove, "_base_problems", None)
    assert "converter can't write this model" in base_problem(model)
    config = RunConfig.model_validate({"model": "tiny", "data": {"path": "rows.jsonl"}})
    run = Run(own_home / "new", config, model, Snapshot.__new__(Snapshot), Plan.__new__(Plan))
    assert "the run is judged by its loss alone: llama.cpp's converter" in unserved_base(run)


@pytest.mark.parametrize("copied", [True, False])
def test_an_export_in_a_copied_home_does_not_write_into_the_originals_run(
    copied: bool, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run outside of the home has one folder, which both homes name."""
    original, run = home(), tmp_path / "run"
    model = original / "models" / MODEL
    model.mkdir(parents=True)
    for name, text in (("hivetune.json", '{"name": "m"}'), ("model.safetensors", ""), ("tokenizer.json", "{}")):
        (model / name).write_text(text)
    write_manifest(model)
    run.mkdir()
    (run / "adapter_model.safetensors").write_bytes(b"weights")
    (run / "adapter_config.json").write_text("{}")
    record = {"schema": 1, "name": "demo", "created": 0, "status": "done", "model": str(model), "home": str(original)}
    write_json(run / "run.json", record)
    if copied:
        shutil.copytree(original, tmp_path / "copy")
        monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "copy"))
        with pytest.raises(UsageError, match="belongs to the home") as refused:
            export_run(run, "adapter")
        assert f"HIVETUNE_HOME={original} hivetune export" in refused.value.hint and not (run / "export").exists()
        monkeypatch.setenv("HIVETUNE_HOME", str(original))
    assert export_run(run, "adapter").made
    assert (run / "export/adapter" / MANIFEST).is_file()
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "copy"))
    assert not export_run(run, "adapter").made, "what is there may be read"
