"""The full counts: 1,500 rows of a Debian machine's pages, looked at by other means."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extraction import answers, options_named, options_without_source, plain_source, rows_of

pytestmark = pytest.mark.proof
ROWS = 1500
LEAST_CATEGORIES = 20
MOST_SECONDS = 120  # of processor time: it uses one core, so that a quiet machine takes no longer
MOST_MEMORY_MB = 400
INSTALL = "the packages that `hivetune synth` names, or their pages in a folder of MANPATH"


def synth(out: Path, *options: str) -> tuple[dict[str, Any], tuple[float, float], float]:
    """(report, seconds of processor and clock, largest memory in MB) of one run of the command."""
    command = [sys.executable, "-m", "hivetune", "synth", "--out", str(out), "--json", *options]
    started = time.monotonic()
    with open(out.with_suffix(".json"), "wb") as said:
        process = subprocess.Popen(command, stdout=said)
        _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return (
        json.loads(out.with_suffix(".json").read_text()),
        (
            usage.ru_utime + usage.ru_stime,
            time.monotonic() - started,
        ),
        usage.ru_maxrss / 1024,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], tuple[float, float], float]:
    out = tmp_path_factory.mktemp("synth") / "rows.jsonl"
    document, seconds, memory_mb = synth(out, "--rows", str(ROWS))
    empty = [one["category"] for one in document["categories"] if not one["kept"]]
    if len(empty) > 24 - LEAST_CATEGORIES:
        pytest.skip(f"no pages for {', '.join(empty)}: needs {INSTALL}")
    return out, document, seconds, memory_mb


def test_categories_are_filled_in_time(made: Any, record_property: Callable[[str, object], None]) -> None:
    _, document, seconds, memory_mb = made
    filled = [one for one in document["categories"] if one["kept"]]
    assert document["rows"] == ROWS and len(filled) >= LEAST_CATEGORIES
    target = ROWS / len(filled)
    assert all(abs(one["kept"] - target) <= 0.1 * target for one in filled)
    assert seconds[0] < MOST_SECONDS and memory_mb < MOST_MEMORY_MB
    record_property("rows", document["rows"])
    record_property("categories_filled", len(filled))
    record_property("empty", ", ".join(one["category"] for one in document["categories"] if not one["kept"]))
    record_property("processor_seconds", round(seconds[0], 1))
    record_property("seconds", round(seconds[1], 1))
    record_property("memory_mb", round(memory_mb))
    record_property("rejected", json.dumps(document["rejected"]))


def test_no_option_without_a_source(made: Any, record_property: Callable[[str, object], None]) -> None:
    named = 0
    for row in rows_of(made[0]):
        assert row["synth"]["sources"] and all(Path(one["file"]).is_file() for one in row["synth"]["sources"])
        assert options_without_source(row) == set(), row
        named += len(options_named(answers(row)))
    assert named > 400
    record_property("options_named", named)
    record_property("options_without_source", 0)


def test_what_is_invented_is_nowhere_on_the_page(made: Any, record_property: Callable[[str, object], None]) -> None:
    wrong = [row for row in rows_of(made[0]) if row["synth"].get("absent")]
    for row in wrong:
        for option in row["synth"]["absent"]:
            assert option not in answers(row)
            assert option not in plain_source(Path(row["synth"]["sources"][0]["file"]))
    assert wrong
    record_property("questions_with_an_invented_option", len(wrong))
