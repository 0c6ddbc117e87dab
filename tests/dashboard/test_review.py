"""The page Review: what is shown first, what each act changes, that it is journaled and can be undone."""

import itertools
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command import hivetune
from cycle.small import make_config, make_rows
from dashboard.test_door import ask, guarded, owner  # noqa: F401 (a fixture)

from hivetune.base.database import open_database, transaction
from hivetune.config import load_config
from hivetune.cycle.rows import pool_of
from hivetune.dashboard.page import form_token
from hivetune.dashboard.review import ROWS_A_PAGE, do_act, newest_acts, review_rows, undo_newest
from hivetune.data.forget import forget
from hivetune.data.intake.interactions import Batch, Delivery, commit_batch, load_set_aside
from hivetune.errors import UsageError
from hivetune.serve.capture import CapturedAnswer, Feedback, Rating, store_answer, store_feedback


def captured(number: int, rating: Rating | None = None, answer: str = "four", logprob: float | None = None) -> str:
    identity = f"hive-{number:024}"
    asked = [{"role": "user", "content": f"What is {number} + 2? Ask ann.miller@posteo.de"}]
    said = {"role": "assistant", "content": answer}
    entry = CapturedAnswer(identity, "demo@1", asked, said, client="c", time=1000.0 + number, logprob=logprob)
    with closing(open_database()) as database:
        store_answer(database, entry)
        if rating:
            store_feedback(database, Feedback(identity, "c", rating))
    return identity


def shown(after: str = "", **query: str) -> list[Any]:
    with closing(open_database()) as database:
        return review_rows(database, query, after)[1]


def act(identity: str, name: str, correction: str = "") -> None:
    with closing(open_database()) as database:
        do_act(database, identity, name, correction, by="ann")


def stored(identity: str) -> dict[str, Any]:
    with closing(open_database()) as database:
        (text,) = database.execute("SELECT row FROM interactions WHERE id = ?", (identity,)).fetchone()
    return json.loads(text)


def test_the_worst_rated_come_first_then_the_least_certain_then_the_newest(own_home: Path) -> None:
    """`logprob`: the mean log-probability of the answer's tokens, which the gateway stores; unknown ones come last."""
    good, old, new = captured(1, "up"), captured(2), captured(3)
    sure, unsure, bad = captured(4, logprob=-0.01), captured(5, logprob=-1.5), captured(6, "down", logprob=-0.2)
    found = shown()
    assert [row.id for row in found] == [bad, unsure, sure, new, old, good]
    assert [row.certainty and round(row.certainty, 2) for row in found] == [0.82, 0.22, 0.99, None, None, None]
    for place, row in enumerate(found, 1):
        assert [rest.id for rest in shown(row.place)] == [rest.id for rest in found[place:]]
    assert [row.id for row in shown(rating="unrated")] == [unsure, sure, new, old]
    assert [row.id for row in shown(rating="bad")] == [bad]
    assert len(shown(source="gateway:demo@1")) == 6 and shown(source="gateway:other") == []


def test_rows_are_filtered_by_what_became_of_them_and_by_what_clients_said(own_home: Path) -> None:
    plain, wrong, liked = captured(1), captured(2), captured(3, "up")
    with closing(open_database()) as database:
        store_feedback(database, Feedback(wrong, "c", "down", "five", "It is too Short."))
    assert [row.id for row in shown(rating="corrected")] == [wrong]
    assert [row.id for row in shown(rating="nobody approved")] == [plain]
    (said,) = shown(reason="too short")
    assert (said.id, said.reason) == (wrong, "It is too Short.") and shown(reason="too long") == []
    assert {row.id for row in shown(rating="good")} == {liked, wrong}


def test_a_user_is_set_aside_by_the_command_and_taken_back_here(own_home: Path) -> None:
    identities = [captured(number) for number in range(3)]
    done = hivetune("forget", "--source", "gateway:demo@1", "--set-aside", "--json")
    assert json.loads(done.stdout)["set_aside"] == 3, done.stderr
    assert {row.id for row in shown(rating="aside")} == set(identities)
    act(identities[0], "aside")
    assert len(shown(rating="aside")) == 2
    nobody = hivetune("forget", "--user", "nobody", "--set-aside")
    assert nobody.returncode == 2 and "no stored row has the user nobody" in nobody.stderr


def test_a_row_is_shown_as_it_is_trained_and_with_its_redactions(own_home: Path) -> None:
    identity = captured(1, answer="<b>four</b>")
    (row,) = shown()
    assert "<mark>[EMAIL]</mark>" in row.turns[0][1] and "&lt;b&gt;four" in row.turns[1][1]
    assert [trained for _, _, trained in row.turns] == [False, False] and "nobody approved it" in row.state
    act(identity, "up")
    (row,) = shown()
    assert [trained for _, _, trained in row.turns] == [False, True] and row.state == "trained: rated up"


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("up", "trained: rated up"),
        ("down", "not trained as a good answer: rated down"),
        ("correct", "trained: corrected"),
    ],
)
def test_every_act_is_journaled_with_its_author_and_can_be_undone(own_home: Path, name: str, state: str) -> None:
    identity = captured(1)
    before = stored(identity)
    act(identity, name, "Five, as ann.miller@posteo.de said.")
    (row,) = shown()
    assert row.state == state
    with closing(open_database()) as database:
        assert [(who, what, whose) for _, whose, what, who, _ in newest_acts(database)] == [("ann", name, identity)]
        assert undo_newest(database) == identity
        assert newest_acts(database) == []
        with pytest.raises(UsageError, match="nothing to undo"):
            undo_newest(database)
    assert stored(identity) == before


def test_a_correction_is_a_row_to_train_and_keeps_the_answer_before(own_home: Path) -> None:
    identity = captured(1)
    act(identity, "correct", "Three. Mail ann.miller@posteo.de")
    row = stored(identity)
    assert row["messages"][-1] == {"role": "assistant", "content": "Three. Mail [EMAIL]"}
    assert row["rejected_answer"]["content"] == "four" and row["feedback"] == 1 and "answered_by" not in row
    for wrong in ("  ", ""):
        with pytest.raises(UsageError, match="must not be empty"):
            act(identity, "correct", wrong)


def test_what_is_set_aside_stays_so_by_its_content_until_it_is_taken_back(own_home: Path) -> None:
    identity = captured(1)
    act(identity, "aside")
    (row,) = shown(rating="aside")
    assert row.is_aside and "set it aside" in row.state
    with closing(open_database()) as database:
        assert load_set_aside(database) == {identity}
        row_again = {"messages": stored(identity)["messages"]}
        commit_batch(database, Batch("f", [Delivery("f", "f:1", row_again)]))
    act(identity, "aside")
    assert shown(rating="aside") == []


@pytest.mark.slow
def test_what_is_set_aside_is_not_trained_and_is_accounted(own_home: Path, tmp_path: Path) -> None:
    config = load_config(make_config(tmp_path), ["data.path=store"])
    rows = [Delivery("f", f"f:{n}", row) for n, row in enumerate(make_rows(0, 12))]
    with closing(open_database()) as database:
        commit_batch(database, Batch("f", rows))
        (identity,) = database.execute("SELECT id FROM interactions LIMIT 1").fetchone()
    before = pool_of(config)
    act(identity, "aside")
    after = pool_of(config)
    assert after.hash != before.hash
    assert after.manifest["accounting"]["set_aside"] == {"set-aside": 1}
    with closing(open_database()) as database:
        undo_newest(database)
    assert pool_of(config).hash == before.hash


def test_what_is_forgotten_leaves_nothing_in_the_journal(own_home: Path) -> None:
    identity = captured(1)
    act(identity, "correct", "Three.")
    with closing(open_database()) as database:
        forget(database, "row", identity)
        assert database.execute("SELECT count(*) FROM acts").fetchone() == (0,)


@pytest.mark.slow
def test_a_hundred_thousand_rows_page_in_less_than_200_ms(own_home: Path, record_property: Any) -> None:
    columns = "id, content_id, source, agent, time, feedback, row"
    with closing(open_database()) as database:
        with transaction(database):
            answers = (json.dumps({"messages": [], "logprob": -(n % 7) / 10}) for n in range(100_000))
            database.executemany(
                f"INSERT INTO interactions ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (f"i{n}", f"c{n}", f"gateway:demo@{n % 9}", f"a{n % 5}", float(n), (n % 3) - 1 or None, row)
                    for n, row in enumerate(answers)
                ),
            )
        seconds = {}
        queries = ("", "rating=unrated", "rating=bad", "rating=good", "agent=a1", "source=gateway:demo@3")
        for query, after in itertools.product(queries, ("", "0.0 -0.3 -50000.0 i50000")):
            asked = dict([query.split("=")] if query else [])
            began = time.process_time()
            rows = review_rows(database, asked, after)[1]
            seconds[query or "all", "first" if not after else "later"] = round(time.process_time() - began, 3)
            assert len(rows) == ROWS_A_PAGE or after
    record_property("seconds of processor time for a page", seconds)
    assert max(seconds.values()) < 0.2, seconds


def test_the_form_is_that_of_this_dashboard_and_a_script_gets_the_row(own_home: Path, guarded: Any) -> None:  # noqa: F811
    identity = captured(1)
    fields = {"id": identity, "act": "up", "token": form_token("/review/act"), "back": "rating=unrated&after="}
    headers = {**owner(), "Origin": guarded[1]}
    refused = ask(guarded, "/dashboard/review/act", "POST", data={**fields, "token": "x"}, headers=headers)
    assert refused.status_code == 403 and "feedback" not in stored(identity)
    done = ask(guarded, "/dashboard/review/act", "POST", data=fields, headers=headers)
    assert (done.status_code, done.headers["location"]) == (303, "/dashboard/review?rating=unrated")
    again = ask(
        guarded, "/dashboard/review/act", "POST", data=fields, headers={**headers, "Accept": "application/json"}
    )
    assert again.json()["id"] == identity and "trained: rated up" in again.json()["html"]
    page = ask(guarded, "/dashboard/review", headers=owner())
    assert page.status_code == 200 and identity in page.text
