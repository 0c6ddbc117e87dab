"""The store of answers and of their clients, without a gateway."""

import json
import threading
from collections.abc import Sequence
from contextlib import closing

import pytest

from hivetune.base.database import open_database, transaction
from hivetune.errors import UsageError
from hivetune.serve.gateway.capture import CapturedAnswer, Feedback, store_entries
from hivetune.serve.gateway.clients import client_of, make_client

BETTER = {"correction": "a better one"}


@pytest.mark.parametrize(
    ("said", "feedback", "answer"),
    [
        ([{"rating": "up"}, {"rating": "down"}], -1, "an answer"),
        ([{"rating": "down", **BETTER}], 1, "a better one"),
        ([{"rating": "down"}, BETTER], 1, "a better one"),
        ([BETTER, {"rating": "down"}], 1, "a better one"),  # of the answer that was given, not of the person's own
    ],
)
def test_a_rating_and_a_correction_come_in_any_order(
    said: Sequence[dict[str, str]], feedback: int, answer: str
) -> None:
    captured = CapturedAnswer(
        "hive-1", "a@1", [{"role": "user", "content": "?"}], {"role": "assistant", "content": "an answer"}
    )
    with closing(open_database()) as database:
        assert store_entries(database, [captured]) == 1
        store_entries(database, [Feedback("hive-1", "a@1", "me", **each) for each in said])  # type: ignore[arg-type]
        ((found, row),) = database.execute("SELECT feedback, row FROM interactions").fetchall()
    assert (found, json.loads(row)["messages"][-1]["content"]) == (feedback, answer)


def test_two_who_make_a_token_of_one_name_do_not_take_it_from_each_other() -> None:
    refused: list[str] = []

    def make() -> None:
        with closing(open_database()) as database, pytest.raises(UsageError) as raised:
            make_client(database, "a b")
        refused.append(raised.value.hint)

    with closing(open_database()) as database:
        other = threading.Thread(target=make)
        with transaction(database):
            other.start()
            other.join(0.2)
            database.execute("INSERT INTO clients VALUES ('a b', 'hash of its token', 0, NULL)")
        other.join(30)
        assert refused == ["revoke it first: hivetune clients --revoke 'a b'"]
        token = make_client(database, "c")
        assert client_of(database, token) == "c" and client_of(database, "hash of its token") is None
