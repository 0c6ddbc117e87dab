"""What `train` says at its end."""

from typing import Any

import pytest

from hivetune.cli.training import show_training

SUMMARY: dict[str, Any] = {
    "run": "runs/one",
    "already_done": False,
    "rows": {"rows_in": 3, "trained": 3},
    "steps": 8,
    "loss_first": 2.0,
    "loss_last": 1.0,
    "adapter_step": 8,
    "tokens_per_second": 100.0,
    "peak_memory_bytes": 10**9,
    "restarts": 2,
    "train_seconds": 9.0,
    "dtype": "float32",
    "device": "cpu",
    "path": "fast",
    "kernels": "native",
    "quarantined": [],
}
CHANGE = {"rung": "small", "says": "micro-batches of half the size", "fault": "the worker was killed", "step": 4}


@pytest.mark.parametrize("changes", [[], [CHANGE]])
def test_a_change_of_arithmetic_is_among_the_last_lines(
    changes: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """After two kills at one step the adapter was another, by design, and only --json held a word of it."""
    show_training({**SUMMARY, "arithmetic_changes": changes})
    said = capsys.readouterr().err
    assert "float32 on cpu, fast path, native kernels" in said
    assert ("changed the arithmetic" in said) == bool(changes)
    if changes:
        assert "from step 4 on" in said and "half the size" in said and "the worker was killed" in said
    show_training(SUMMARY)  # of a run that an older version made
