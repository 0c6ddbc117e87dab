"""Before a training: a small model of the same architecture is converted, served and compared."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_families import write_model

from hivetune.errors import HivetuneError, UsageError
from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.models.architecture import read_architecture
from hivetune.models.gguf_header import read_header
from hivetune.process.protocol import Passage
from hivetune.release.dry_export import check_dry_export, write_dry_export
from hivetune.release.gguf import find_converter, untested_pair
from hivetune.release.prove import score_passages

PASSAGES = (Passage(tuple(range(300, 360)), tuple(range(30, 60))),)


def try_dry(model: Path, folder: Path) -> None:
    linears = read_architecture(model).adapted()
    task, trained = write_dry_export(model, linears, find_converter(), PASSAGES, folder)
    assert read_header(task.file).settings["general.name"] == model.parent.name
    settings = ServerSettings(adapters=((task.adapter_file, 0.0),), device="cpu", warm_up=False)
    with open_backend(task.file, settings) as backend:
        base, _ = score_passages(backend, PASSAGES)
        tuned, _ = score_passages(backend, PASSAGES, adapter=0)
    check_dry_export(trained, base, tuned)


def change(model: Path, **settings: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.slow
def test_a_model_that_llama_cpp_computes_passes(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3")
    described = json.loads((tmp_path / "model/hivetune.json").read_text())
    (tmp_path / "model/hivetune.json").write_text(json.dumps({**described, "name": tmp_path.name}))
    try_dry(tmp_path / "model", tmp_path / "dry")


@pytest.mark.slow
def test_a_gemma_that_llama_cpp_computes_otherwise_is_refused_before(tmp_path: Path) -> None:
    """llama.cpp scales Gemma 3's scores by the width of a head, whatever the file says."""
    write_model(tmp_path / "model", "gemma3")
    change(tmp_path / "model", query_pre_attn_scalar=4)
    described = json.loads((tmp_path / "model/hivetune.json").read_text())
    (tmp_path / "model/hivetune.json").write_text(json.dumps({**described, "name": tmp_path.name}))
    with pytest.raises(HivetuneError, match="compute different results"):
        try_dry(tmp_path / "model", tmp_path / "dry")


@pytest.mark.parametrize(
    ("kinds", "count"), [("fffff", 1), ("sssssfsssssfss", 6), ("dmmmmm", 2), ("sfsfff", 4), ("ssf", 3)]
)
def test_the_small_model_has_the_layers_that_show_how_all_follow_each_other(kinds: str, count: int) -> None:
    from hivetune.release.worker.dry import _layer_count

    assert _layer_count({"layer_types": list(kinds)}, len(kinds)) == count


def test_a_width_that_heads_do_not_divide_is_widened() -> None:
    """SmolLM2-135M has nine heads: 256 channels can't be divided among them, and its training could not begin."""
    from transformers import AutoConfig

    from hivetune.release.worker.dry import _smaller

    config = AutoConfig.for_model(
        "llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    )
    (kind, narrow), (_, whole) = _smaller(config)
    assert (kind, narrow["hidden_size"], narrow["intermediate_size"]) == ("llama", 288, 512)
    assert narrow["num_hidden_layers"] == whole["num_hidden_layers"] == 1 and whole["hidden_size"] == 576
    assert AutoConfig.for_model(kind, **narrow).hidden_size == 288


def test_a_converter_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"export.converter: .* has no convert_hf_to_gguf.py"):
        find_converter(str(tmp_path))
    monkeypatch.setenv("HIVETUNE_CONVERTERS", str(tmp_path))
    with pytest.raises(HivetuneError, match="it is not installed") as caught:
        find_converter()
    assert caught.value.hint == "run hivetune fetch llama.cpp"


def test_a_failure_names_a_pair_that_is_not_the_tested_one() -> None:
    tested = find_converter().name
    assert untested_pair(tested, "xllamacpp 2026.10.11549") == []
    assert "/opt/llama-server 1" in untested_pair(tested, "/opt/llama-server 1")[0]
