"""A base is converted and proven once, before its first training, and a release answers as it was proven."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from serve.hive import MODEL, add_release, make_home

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, home, sha256_file
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot
from hivetune.errors import HivetuneError
from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.process.protocol import Passage
from hivetune.release import prove
from hivetune.release.gguf import SERVED_QUANT, base_gguf
from hivetune.release.prove import base_problem, unserved_base
from hivetune.release.registry import find, gguf_adapter
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


@pytest.mark.slow
def test_another_adapter_in_the_place_of_a_proven_one_is_found(own_home: Path, tmp_path: Path) -> None:
    model, passages = make_home(), [Passage(tuple(range(300, 330)), (20, 21, 22, 29))]
    base = base_gguf(MODEL, sha256_file(model / MANIFEST), SERVED_QUANT)
    labels = [add_release(tmp_path, "helpdesk", seed) for seed in (1, 2)]
    with closing(open_database()) as database:
        files = [gguf_adapter(find(database, label)) for label in labels]
    settings = ServerSettings(adapters=((files[0], 0.0), (files[1], 0.0)), context_tokens=256)
    with open_backend(base, settings) as backend:
        scores, _ = prove.score_passages(backend, passages, adapter=0)
        proof = {"quant": SERVED_QUANT, "recorded": prove.record(passages, scores)}
        prove.check_recorded(backend, json.loads(json.dumps(proof)), SERVED_QUANT, 0, labels[0])
        with pytest.raises(HivetuneError, match="answers differently from when it was registered"):
            prove.check_recorded(backend, proof, SERVED_QUANT, 1, labels[0])
