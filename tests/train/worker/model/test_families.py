"""The table of families: a sample of it is tried here, all of it by `make proof NAME=families`."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
MIN_SHARE = 0.9
NAMED = (
    *(
        "qwen3_5_text",
        "granitemoehybrid",
        "lfm2",
        "mamba2",
        "rwkv",
        "gemma3n_text",
        "phi3",
        "olmo2",
        "olmo3",
        "smollm3",
    ),
    *("cohere2", "llama4_text", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v2", "deepseek_v3"),
    "glm4_moe",
)


def load_tool() -> ModuleType:
    """tools/families.py, which finds the module beside it as when it is run."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("families")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def committed() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((ROOT / "docs/families.json").read_text(encoding="utf-8"))
    return table


def test_the_page_is_the_table() -> None:
    assert (ROOT / "docs/families.md").read_text(encoding="utf-8") == load_tool().page(committed())


def test_nine_of_ten_families_train_and_no_other_begins() -> None:
    count_verdicts(committed())


def count_verdicts(table: dict[str, Any]) -> tuple[int, int, int]:
    """Families that train, that are refused as other kinds, and all."""
    tool, rows = load_tool(), table["families"]
    said = {kind: tool.verdict(row) for kind, row in rows.items()}
    trains = sum(words == "trains" for words in said.values())
    refused = sum(words == "refused" for words in said.values())
    assert trains >= MIN_SHARE * (len(rows) - refused)
    assert not [kind for kind in NAMED if kind not in rows]
    # Nothing trains on without being PEFT's equal: what fails, fails by an error.
    assert not [kind for kind, words in said.items() if words.startswith(("differs", "a step"))]
    return trains, refused, len(rows)


@pytest.mark.proof
def test_all_families(tmp_path: Path, record_property: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder = Path(os.environ.get("HIVETUNE_PROOF_FOLDER", tmp_path))
    table = load_tool().fill_table(folder / "families.json")
    assert table["families"].keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    trains, refused, families = count_verdicts(table)
    record_property("families", families)
    record_property("train", trains)
    record_property("refused_as_another_kind", refused)
    record_property("seconds", round(sum(row["seconds"] for row in table["families"].values())))
