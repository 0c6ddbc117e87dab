"""What one client of the gateway can teach: bounded by its token, whatever users it names."""

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

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
