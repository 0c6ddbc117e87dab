"""A base model that was upgraded in its place, under a release that was trained on the one before."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from serve.hive import MODEL, add_release, make_home

from hivetune.base.disk import MANIFEST, sha256_file, write_manifest
from hivetune.errors import UsageError
from hivetune.judge.answers import find_artefact
from hivetune.release.gguf import SERVED_QUANT, base_gguf

pytestmark = pytest.mark.slow


def upgrade(folder: Path) -> None:
    weights = folder / "model.safetensors"
    save_file({name: tensor[::-1].copy() for name, tensor in load_file(weights).items()}, weights)
    (folder / MANIFEST).unlink()
    write_manifest(folder)


def test_a_release_keeps_its_own_base_and_has_no_loss_on_another(own_home: Path, tmp_path: Path) -> None:
    folder = make_home()
    label = add_release(tmp_path, "demo", 1, champion=True)
    before, base_sha256 = find_artefact(label, None), sha256_file(folder / MANIFEST)
    assert before.trained is not None and before.trained[0] == folder
    upgrade(folder)
    after = find_artefact(label, None)
    assert after.trained is None  # what its adapter makes of another base says nothing about it
    assert (after.model, after.identity) == (before.model, before.identity)  # and it is served as it was
    assert base_gguf(MODEL, sha256_file(folder / MANIFEST), SERVED_QUANT) != before.model
    assert before.model is not None
    before.model.unlink()
    with pytest.raises(UsageError, match="not the one that this release was trained on"):
        base_gguf(MODEL, base_sha256, SERVED_QUANT)
