"""From rows to an answer over HTTP: tiny random models of many architectures through llama.cpp's converter and server,
each with the proof passed. `tools/served.py` does one; each in a process of its own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import families
import served

# The small models of this year and the oldest shapes: no two are converted alike.
TWELVE = (
    *("qwen3_5_text", "gemma4_text", "ministral3", "smollm3", "granite", "lfm2", "olmo2", "gpt_oss"),
    *("phi", "falcon", "gpt_neox", "phi3"),
)
# q8_0 rounds what tiny random models say by 0.03 to 0.06 nats, and with it the slope by one or two in a hundred.
EFFECT = (0.97, 1.03)


@pytest.fixture(scope="module")
def warm() -> None:
    families.warm_up()


def check(kind: str) -> None:
    row = served.serve_apart(kind)
    assert row.get("served") and row.get("lora") and row["answer_tokens"] > 0, row
    assert EFFECT[0] <= row["effect"] <= EFFECT[1], row
    assert row["name"] == "tiny", row
    if kind == "phi3":
        assert row["context"] == 256, "llama.cpp has no window for it, so its context ends there"


@pytest.mark.slow
@pytest.mark.parametrize("kind", TWELVE)
def test_a_family_is_served_as_it_is_trained(kind: str, warm: None) -> None:
    check(kind)
