"""The most that one client of the gateway, and what was made by a generator, can teach: drawn by content, counted."""

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from data.conftest import written

from hivetune.base.database import open_database
from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.serve.capture import CapturedAnswer, Feedback, store_answer, store_feedback


def approved(client: str, count: int, first: int) -> None:
    """Capture answers that their client approved, each for another user."""
    with closing(open_database()) as database:
        for number in range(first, first + count):
            identity = f"hive-{number:024}"
            asked = [{"role": "user", "content": f"What is {number} plus {7 * number + 1}?"}]
            answer = {"role": "assistant", "content": f"It is {8 * number + 1}, as {client} says."}
            entry = CapturedAnswer(identity, "demo@1", asked, answer, client=client, user=f"user-{number}")
            store_answer(database, entry)
            store_feedback(database, Feedback(identity, client, "up"))


@pytest.mark.parametrize(
    ("counts", "most"),
    [
        ((300, 40), 0.5),
        ((300, 40, 40), 1 / 3),
        ((300,), 1.0),  # nobody is outvoted
    ],
)
def test_a_client_teaches_its_share_at_most(own_home: Path, counts: tuple[int, ...], most: float) -> None:
    for number, count in enumerate(counts):
        approved(f"client-{number}", count, 1000 * number)
    report = check(DataConfig(path="store", near_duplicates=0)).document
    left = Counter(report["set_aside"])["quota"]
    kept = counts[0] - left
    assert kept / (kept + sum(counts[1:])) <= most + 0.01
    assert kept / (kept + sum(counts[1:])) >= most - 0.05, "no more than needed is left out"


def write(path: Path, real: int, made: int) -> Path:
    rows: list[dict[str, Any]] = [
        {"prompt": f"Question {n} of a person?", "completion": f"Reply {n * 7}."} for n in range(real)
    ]
    for n in range(made):
        rows.append({"messages": [{"role": "user", "content": f"What is option {n} good for?"},
                                  {"role": "assistant", "content": f"It sets the number {n * 13}."}],
                     "synth": {"maker": "templates", "kind": "meaning"}})  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("real", "made", "kept"), [(20, 50, 20), (20, 10, 10), (0, 30, 30)])
def test_synthetic_rows_beside_others_are_so_many_at_most_and_alone_all_are_used(
    real: int, made: int, kept: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", real, made)
    document = check(DataConfig(path=str(path), near_duplicates=0)).document
    assert document["synthetic"] == {"rows": kept, "others": real}
    assert document["set_aside"].get("quota", 0) == made - kept
    assert document["usable"] == real + kept == document["rows_in"] - (made - kept)


def test_the_same_synthetic_rows_are_drawn_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 5, 40)
    turned = tmp_path / "turned.jsonl"
    turned.write_text("\n".join(reversed(path.read_text().splitlines())) + "\n")

    drawn, drawn_turned = (written(file, near_duplicates=0)["passed"] for file in (path, turned))
    assert len(drawn) == 10 and drawn == drawn_turned[::-1]
