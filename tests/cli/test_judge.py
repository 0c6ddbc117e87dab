"""What `hivetune eval` says at its end."""

from typing import Any

import pytest

from hivetune.cli.judge import next_step

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
