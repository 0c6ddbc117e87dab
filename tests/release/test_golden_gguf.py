"""A GGUF file of a random model: the header's settings and the hash of each tensor are what they were.

Random weights are drawn otherwise on other processors, so hashes are kept for each.

To accept a wanted change, such as another converter, run this file with HIVETUNE_WRITE_GOLDEN=1.
"""

import json
import os
from pathlib import Path

import gguf
import pytest
from gguf_families import write_model
from train.worker.test_golden_runs import processor

from hivetune.base.disk import sha256_bytes
from hivetune.models.gguf_header import read_header
from hivetune.records import silent
from hivetune.release.gguf import write_gguf

NAMES = ("general.name", "general.finetune")  # of folders
GOLDEN = Path(__file__).parent / "golden" / "gguf.json"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["f16", "q8_0"])
def test_a_gguf_file_holds_what_it_held(recipe: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama3")
    file = write_gguf(tmp_path / "model", None, recipe, tmp_path, "tiny.gguf", silent)
    settings = read_header(file).settings
    tensors = gguf.GGUFReader(file).tensors
    found = {
        "settings": {key: value for key, value in settings.items() if key not in NAMES},
        "tensors": {tensor.name: [tensor.tensor_type.name, *map(int, tensor.shape)] for tensor in tensors},
    }
    found = json.loads(json.dumps(found))
    hashes = {tensor.name: sha256_bytes(tensor.data.tobytes())[:16] for tensor in tensors}
    known = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    golden = known.get(recipe, {"hashes": {}})
    if os.environ.get("HIVETUNE_WRITE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(exist_ok=True)
        known[recipe] = {**found, "hashes": {**golden["hashes"], processor(): hashes}}
        GOLDEN.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        return
    assert found == {key: golden[key] for key in found}
    assert golden["hashes"].get(processor(), hashes) == hashes
