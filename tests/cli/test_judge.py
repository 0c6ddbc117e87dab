"""What `hivetune eval`, `register` and `train` say at their end."""

from typing import Any

import pytest

from hivetune.cli.judge import next_step
from hivetune.cli.train import training_text

MORE = "hold out more rows (data.test)"
QUIET = "evaluate again when the machine is quiet: hivetune eval RUN"
UNCHECKED = {"name": "success", "required": True, "n": 0, "passed": None}


def unmet(name: str, needed: int | None) -> dict[str, Any]:
    return {"name": name, "required": True, "n": 3, "passed": False, "needed": needed}


@pytest.mark.parametrize(
    ("verdict", "metrics", "said"),
    [
        ("not-enough-evidence", [UNCHECKED], "checker"),  # more rows would be as unchecked as these
        ("not-enough-evidence", [{**UNCHECKED, "n": 9}], MORE),
        ("not-enough-evidence", [{**UNCHECKED, "required": False}], MORE),
        ("not-enough-evidence", [unmet("loss", 90)], MORE),
        ("not-enough-evidence", [unmet("latency_s", 9)], "answer more held-out rows (eval.prompts, data.test)"),
        ("not-enough-evidence", [unmet("loss", 90), unmet("latency_s", None)], f"{MORE}; {QUIET}"),
        ("abort", [UNCHECKED], "answers in eval.json"),
    ],
)
def test_the_next_step_gives_what_the_open_metrics_lack(verdict: str, metrics: list[dict[str, Any]], said: str) -> None:
    assert said in next_step(verdict, metrics)


SUMMARY: dict[str, Any] = {
    **{"run": "runs/one", "already_done": False, "rows": {"rows_in": 3, "rejected": {"bad-json": 2}}, "steps": 8},
    **{"loss_first": 2.0, "loss_last": 1.0, "adapter_step": 8, "tokens_per_second": 100.0, "restarts": 2},
    **{"peak_memory_bytes": 10**9, "train_seconds": 9.0, "dtype": "float32", "device": "cpu", "path": "fast"},
    **{"kernels": "native", "quarantined": [], "storage_problem": ""},
}
CHANGE = "from step 4 on it computed with micro-batches of half the size (the worker was killed)"


@pytest.mark.parametrize("changes", [[], [CHANGE]])
def test_a_change_of_arithmetic_is_among_the_last_lines_of_a_training(changes: list[str]) -> None:
    """After two kills at one step the adapter was another, by design, and only --json held a word of it."""
    told, *lines = training_text({**SUMMARY, "arithmetic_changes": changes})
    assert "tokens per second: 100\npeak memory:       1.0 GB\n" in told
    assert told.endswith("rows:              rows in 3, rejected bad-json 2")
    assert ("from step 4 on" in str(lines)) == bool(changes)
