"""Review: stored answers and rows, worst rated first, for the person who owns them: good, bad, correct, set aside,
forget.

Each row is shown as it is stored, so with its redactions, and says whether its last answer is trained. Every act is
written down with its author, and can be undone, but for forgetting, which removes the row for good. Corrections are
rows to train from then on.
"""

import json
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from hivetune.base.database import home_as_it_is, open_database, transaction
from hivetune.dashboard.page import Page, PageRequest
from hivetune.dashboard.watched import Watcher
from hivetune.data.intake.interactions import change_row
from hivetune.errors import NotThere, UsageError
from hivetune.serve.capture import correct_row, rate_row
from hivetune.serve.register import who

ROWS_A_PAGE = 20
MAX_SHOWN_CHARS = 4000
# What of a row can be asked for, as its condition.
RATINGS = {
    "bad": "i.feedback < 0",
    "unrated": "i.feedback IS NULL",
    "good": "i.feedback > 0",
    "corrected": "i.row ->> 'rejected_answer' NOT NULL",
    "nobody approved": "i.row ->> 'answered_by' NOT NULL AND i.feedback IS NULL",
    "aside": "aside.time NOT NULL",
}
ACTS = ("up", "down", "correct", "aside")
_REDACTED = re.compile(r"\[[A-Z][A-Z0-9_-]{2,30}\]")  # as data/checks/redact writes what it took out
_FROM = "FROM interactions i LEFT JOIN set_aside aside USING (content_id) LEFT JOIN feedback said ON said.answer = i.id"
_ORDER = "coalesce(i.feedback, 0), -coalesce(i.time, 0), i.id"
_SELECT = f"SELECT i.id, i.source, i.agent, i.time, i.feedback, i.row, aside.time, said.reason {_FROM}"


@dataclass(frozen=True)
class ReviewRow:
    """A stored row as the page shows it. `turns`: role, text as HTML, and whether it is trained. `state`: in words what
    training makes of it. `reason`: what its client said of it."""

    id: str
    source: str
    agent: str
    time: float | None
    rating: float | None
    is_aside: bool
    turns: tuple[tuple[str, Markup, bool], ...]
    state: str
    answer: str
    can_correct: bool
    reason: str = ""

    @property
    def place(self) -> str:
        """Return its place in the order of the page."""
        return f"{self.rating or 0.0!r} {-(self.time or 0.0)!r} {self.id}"


def review_page(watcher: Watcher, request: PageRequest) -> Page:
    query = {key: request.query.get(key, "").strip() for key in ("source", "agent", "rating", "reason")}
    after = request.query.get("after", "")
    with home_as_it_is() as database:
        total, rows = review_rows(database, query, after)
        agents = [
            agent for (agent,) in database.execute("SELECT DISTINCT agent FROM interactions WHERE agent NOT NULL")
        ]
        releases = [
            source
            for (source,) in database.execute("SELECT DISTINCT source FROM interactions WHERE source LIKE 'gateway:%'")
        ]
        acts = newest_acts(database)
    values = {
        "rows": rows,
        "total": total,
        "query": query,
        "here_again": urllib.parse.urlencode({**query, "after": after}),
        "next_page": urllib.parse.urlencode({**query, "after": rows[-1].place}) if len(rows) == ROWS_A_PAGE else "",
        "agents": sorted(agents),
        "releases": sorted(releases),
        "ratings": tuple(RATINGS),
        "acts": acts,
    }
    return Page("review.html", "Review", values)


def review_rows(database: sqlite3.Connection, query: Mapping[str, str], after: str = "") -> tuple[int, list[ReviewRow]]:
    """Return how many rows there are, and those of a page: the worst rated first, then the newest.

    `after`: the place of the last row of the page before, so that a page skips nothing when rows before it were rated.
    Raises UsageError for a place that is none.
    """
    conditions: list[str] = []
    values: list[Any] = []
    if query.get("source"):  # its beginning
        conditions.append("i.source >= ? AND i.source < ?")
        values += [query["source"], query["source"] + "\U0010ffff"]
    if query.get("agent"):
        conditions.append("i.agent = ?")
        values.append(query["agent"])
    if query.get("reason"):
        conditions.append("instr(lower(said.reason), lower(?))")
        values.append(query["reason"])
    if query.get("rating") in RATINGS:
        conditions.append(RATINGS[query["rating"]])
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    (total,) = database.execute(f"SELECT count(*) {_FROM}{where}", values).fetchone()
    if after:
        where += f" {'AND' if conditions else 'WHERE'} ({_ORDER}) > (?, ?, ?)"
        values += _place(after)
    found = database.execute(f"{_SELECT}{where} ORDER BY {_ORDER} LIMIT ?", [*values, ROWS_A_PAGE])
    return int(total), [_row(*each) for each in found]


def _place(text: str) -> tuple[float, float, str]:
    """Return the values of `_ORDER` of a row."""
    rating, _, rest = text.partition(" ")
    moment, _, identity = rest.partition(" ")
    try:
        return float(rating), float(moment), identity
    except ValueError:
        raise UsageError("the address names no place among the rows", hint="open the page Review again") from None


def _row(
    identity: str,
    source: str,
    agent: str | None,
    moment: float | None,
    rating: float | None,
    text: str,
    aside: float | None,
    reason: str | None,
) -> ReviewRow:
    row = json.loads(text)
    messages = row.get("messages")
    chat = [turn for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    state = _state(row, rating, is_aside=aside is not None)
    is_trained = state.startswith("trained")
    last = chat[-1] if chat else {}
    can_correct = last.get("role") == "assistant" and isinstance(last.get("content"), str | None)
    turns = [
        (str(turn.get("role", "")), _shown(turn), is_trained and turn.get("role") == "assistant" and turn is last)
        for turn in chat
    ] or [("row", _marked(json.dumps(row, ensure_ascii=False, indent=1)), False)]
    if isinstance(rejected := row.get("rejected_answer"), dict):
        turns.append(("answer before", _shown(rejected), False))
    return ReviewRow(
        id=identity,
        source=source,
        agent=agent or "",
        time=moment,
        rating=rating,
        is_aside=aside is not None,
        turns=tuple(turns),
        state=state,
        answer=(last.get("content") or "") if can_correct else "",
        can_correct=can_correct,
        reason=reason or "",
    )


def _state(row: Mapping[str, Any], rating: float | None, *, is_aside: bool) -> str:
    if is_aside:
        return "not trained: a person set it aside"
    if "rejected_answer" in row:
        return "trained: corrected"
    if rating is not None and rating < 0:
        return "not trained as a good answer: rated down"
    if rating is not None and rating > 0:
        return "trained: rated up"
    if row.get("answered_by"):
        return "not trained: a release answered, and nobody approved it"
    return "trained, unless a check says otherwise"


def _shown(turn: Mapping[str, Any]) -> Markup:
    content = turn.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    if turn.get("tool_calls"):
        text += json.dumps(turn["tool_calls"], ensure_ascii=False)
    return _marked(text)


def _marked(text: str) -> Markup:
    """Return a text as HTML, cut for display, with what redaction took out marked."""
    shown = text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " ..."
    return Markup(_REDACTED.sub(lambda found: f"<mark>{found[0]}</mark>", str(escape(shown))))


def newest_acts(database: sqlite3.Connection, count: int = 10) -> list[tuple[int, str, str, str, float]]:
    """Return number, interaction, act, author and time of the newest acts that were not undone."""
    return database.execute(
        "SELECT number, interaction, act, by, time FROM acts WHERE undone IS NULL ORDER BY number DESC LIMIT ?",
        (count,),
    ).fetchall()


def do_act(database: sqlite3.Connection, identity: str, act: str, correction: str, *, by: str) -> None:
    """Rate, correct or set aside a row, and write the act down with what was before. Raises NotThere, UsageError."""
    with transaction(database):
        content, row, aside = _stored(database, identity)
        before = json.dumps({"row": row, "aside": aside})
        if act in ("up", "down"):
            changed = rate_row(row, "up" if act == "up" else "down")
        elif act == "correct":
            changed = correct_row(row, correction)
        elif act == "aside":
            changed = row
            if aside:
                database.execute("DELETE FROM set_aside WHERE content_id = ?", (content,))
            else:
                database.execute("INSERT INTO set_aside VALUES (?, ?, ?)", (content, by, time.time()))
        else:
            raise UsageError(f"unknown act {act!r}", hint=f"choose one of: {', '.join(ACTS)}")
        change_row(database, identity, changed, changed.get("feedback"))
        database.execute(
            "INSERT INTO acts (interaction, act, by, time, before) VALUES (?, ?, ?, ?, ?)",
            (identity, act, by, time.time(), before),
        )


def undo_newest(database: sqlite3.Connection, number: int | None = None) -> str:
    """Undo an act, by default the newest, and return the id of its row. Later acts on the same row are undone first.
    Raises UsageError where there is none."""
    with transaction(database):
        found = database.execute(
            "SELECT number, interaction, before FROM acts WHERE undone IS NULL AND (?1 IS NULL OR number >= ?1 AND"
            " interaction = (SELECT interaction FROM acts WHERE number = ?1)) ORDER BY number DESC"
            + (" LIMIT 1" if number is None else ""),
            (number,),
        ).fetchall()
        if not found:
            raise UsageError("there is nothing to undo")
        identity, before = str(found[-1][1]), json.loads(found[-1][2])
        content, _, _ = _stored(database, identity)
        change_row(database, identity, before["row"], before["row"].get("feedback"))
        database.execute("DELETE FROM set_aside WHERE content_id = ?", (content,))
        if before["aside"]:
            database.execute("INSERT INTO set_aside VALUES (?, ?, ?)", (content, who(), time.time()))
        undone = [(time.time(), act) for act, _, _ in found]
        database.executemany("UPDATE acts SET undone = ? WHERE number = ?", undone)
    return identity


def _stored(database: sqlite3.Connection, identity: str) -> tuple[str, dict[str, Any], bool]:
    """Return content id and row of an interaction, and whether it is set aside. Raises NotThere."""
    found = database.execute("SELECT content_id, row FROM interactions WHERE id = ?", (identity,)).fetchone()
    if found is None:
        raise NotThere("no stored row has this id", hint="it may have been forgotten")
    aside = database.execute("SELECT 1 FROM set_aside WHERE content_id = ?", (found[0],)).fetchone()
    return str(found[0]), json.loads(found[1]), aside is not None


def act_on_row(form: Mapping[str, str]) -> ReviewRow:
    """Do what a form says, and return the row as it is now."""
    with closing(open_database()) as database:
        if form.get("act") == "undo":
            number = form.get("number", "")
            identity = undo_newest(database, int(number) if number.isdecimal() and len(number) <= 9 else None)
        else:
            identity = form.get("id", "")
            do_act(database, identity, form.get("act", ""), form.get("correction", ""), by=who())
        return next(_found(database, identity))


def _found(database: sqlite3.Connection, identity: str) -> Iterator[ReviewRow]:
    for each in database.execute(f"{_SELECT} WHERE i.id = ?", (identity,)):
        yield _row(*each)
