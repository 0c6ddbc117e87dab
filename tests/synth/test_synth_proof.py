"""The full counts: 1,500 rows of a Debian machine's pages, looked at by other means."""

import json
import os
import subprocess
import sys
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
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """(document, rows, what the process used) of one run of the command."""
    out = tmp_path_factory.mktemp("synth") / "rows.jsonl"
    command = [sys.executable, "-m", "hivetune", "synth", "--out", str(out), "--rows", str(ROWS), "--json"]
    with open(out.with_suffix(".json"), "wb") as said:
        _, status, usage = os.wait4(subprocess.Popen(command, stdout=said).pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    document = json.loads(out.with_suffix(".json").read_text())
    empty = [one["category"] for one in document["categories"] if not one["kept"]]
    if len(empty) > 24 - LEAST_CATEGORIES:
        pytest.skip(f"no pages for {', '.join(empty)}: needs {INSTALL}")
    return document, list(rows_of(out)), usage


def test_categories_are_filled_in_time(made: Any, record_property: Record) -> None:
    document, _, usage = made
    filled = [one for one in document["categories"] if one["kept"]]
    assert document["rows"] == ROWS and len(filled) >= LEAST_CATEGORIES
    # One whose pages hold fewer rows than its share gives the rest to the others, which stay equal.
    full = [one["kept"] for one in filled if one["kept"] >= one["asked"]]
    assert len(full) >= LEAST_CATEGORIES - 4
    assert all(abs(kept - sum(full) / len(full)) <= 0.1 * sum(full) / len(full) for kept in full)
    seconds, memory_mb = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    assert seconds < MOST_SECONDS and memory_mb < MOST_MEMORY_MB
    empty = ", ".join(one["category"] for one in document["categories"] if not one["kept"])
    counts = {"rows": document["rows"], "categories_filled": len(filled), "empty": empty}
    counts |= {"processor_seconds": round(seconds, 1), "memory_mb": round(memory_mb)}
    for name, count in {**counts, "rejected": json.dumps(document["rejected"])}.items():
        record_property(name, count)


def test_no_option_without_a_source(made: Any, record_property: Record) -> None:
    named = 0
    for row in made[1]:
        assert row["synth"]["sources"] and all(Path(one["file"]).is_file() for one in row["synth"]["sources"])
        assert options_without_source(row) == set(), row
        named += len(options_named(answers(row)))
    assert named > 400
    record_property("options_named", named)
    record_property("options_without_source", 0)


def test_what_is_invented_is_nowhere_on_the_page(made: Any, record_property: Record) -> None:
    wrong = [row for row in made[1] if row["synth"].get("absent")]
    assert wrong
    for row in wrong:
        for option in row["synth"]["absent"]:
            assert option not in answers(row) + plain_source(Path(row["synth"]["sources"][0]["file"]))
    record_property("questions_with_an_invented_option", len(wrong))
