"""Review: stored answers and rows, worst rated and least certain first, for the person who owns them: good, bad,
correct, set aside, forget.

Each row is shown as it is stored, with its redactions and with a note whether its last answer is trained. Every action
is recorded with its author and can be undone, except forgetting, which removes the row for good. A corrected row is
used for training from then on.
"""

import json
import math
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from hivetune.base.database import open_database, open_existing_database, transaction
from hivetune.dashboard.page import Page, PageRequest
from hivetune.dashboard.watched import Watcher
from hivetune.data.intake.interactions import change_row
from hivetune.errors import NotThere, UsageError
from hivetune.release.registry import who
from hivetune.serve.capture import correct_row, rate_row

ROWS_A_PAGE = 20  # a person rates them in some minutes, and then sees the next worst
MAX_SHOWN_CHARS = 4000  # of a turn: a screen of text
# Conditions are written as the indexes of interactions are (base/hive.sql), which keeps a page of 100,000 rows below
# 200 ms.
FILTERS = {
    "source": "i.source >= :source AND i.source < :source || char(1114111)",  # its beginning
    "agent": "i.agent = :agent",
    "reason": "said.answer NOT NULL AND instr(lower(said.reason), lower(:reason))",
}
RATINGS = {
    "bad": "coalesce(i.feedback, 0) < 0",
    "unrated": "coalesce(i.feedback, 0) = 0",
    "good": "coalesce(i.feedback, 0) > 0",
    "corrected": "i.row ->> 'rejected_answer' NOT NULL",
    "nobody approved": "i.row ->> 'answered_by' NOT NULL AND i.feedback IS NULL",
    "aside": "aside.content_id NOT NULL",
}
# Filters that few rows pass: these are found first and put in order, instead of looking at all rows in their order.
_FEW = ("corrected", "aside")
ACTS = ("up", "down", "correct", "aside")
_REDACTED = re.compile(r"\[[A-Z][A-Z0-9_-]{2,30}\]")  # as data/checks/redact writes what it took out
_FROM = "FROM interactions i LEFT JOIN set_aside aside USING (content_id) LEFT JOIN feedback said ON said.answer = i.id"
# The worst rated, then the least certain, then the newest; the index interactions_review has the same expressions.
# `logprob`: the mean log-probability of an answer's tokens, at most 0; 1 where nobody measured it, so last.
_LOGPROB = "coalesce(CAST(i.row ->> 'logprob' AS REAL), 1.0)"
_ORDER = ("coalesce(i.feedback, 0)", _LOGPROB, "-coalesce(i.time, 0)", "i.id")
_COLUMNS = "i.id, i.source, i.agent, i.time, i.feedback, i.row, aside.time, said.reason"


@dataclass(frozen=True)
class ReviewRow:
    """A stored row for the page. `turns`: role, text as HTML, and whether it is trained. `state`: its use in training,
    in words. `answer`: the text that a correction replaces, None if nothing can be corrected. `reason`: the client's
    comment. `place`: its position in the order of the page.
    """

    id: str
    source: str
    agent: str
    time: float | None
    certainty: float | None
    is_aside: bool
    turns: tuple[tuple[str, Markup, bool], ...]
    state: str
    answer: str | None
    reason: str
    place: str


def review_page(watcher: Watcher, request: PageRequest) -> Page:
    query = {key: request.query.get(key, "").strip() for key in (*FILTERS, "rating")}
    after = request.query.get("after", "")
    with open_existing_database() as database:
        total, rows = review_rows(database, query, after)
        agents = database.execute("SELECT DISTINCT agent FROM interactions WHERE agent NOT NULL ORDER BY 1").fetchall()
        releases = "SELECT DISTINCT source FROM interactions WHERE source >= 'gateway:' AND source < 'gateway;'"
        values = {
            "rows": rows,
            "total": total,
            "query": query,
            "here_again": urllib.parse.urlencode({**query, "after": after}),
            "next_page": urllib.parse.urlencode({**query, "after": rows[-1].place}) if rows[ROWS_A_PAGE - 1 :] else "",
            "agents": [agent for (agent,) in agents],
            "releases": sorted(source for (source,) in database.execute(releases)),
            "ratings": tuple(RATINGS),
            "acts": newest_acts(database),
        }
    return Page("review.html", "Review", values)


def review_rows(database: sqlite3.Connection, query: Mapping[str, str], after: str = "") -> tuple[int, list[ReviewRow]]:
    """Return the number of rows that match, and those of one page, in order.

    `after`: the `place` of the last row of the previous page, so that no row is skipped when earlier ones were rated.
    Raises UsageError for an invalid place.
    """
    conditions = ["1", *(condition for name, condition in FILTERS.items() if query.get(name))]
    conditions += [RATINGS[query["rating"]]] if query.get("rating") in RATINGS else []
    where, values = " AND ".join(conditions), dict[str, Any](query)
    (total,) = database.execute(f"SELECT count(*) {_FROM} WHERE {where}", values).fetchone()
    # A plus keeps SQLite from the index of an expression.
    few = "+" * bool(query.get("reason") or query.get("rating") in _FEW)
    order = [few + each for each in _ORDER]
    if after:
        # SQLite finds the first rating in the index only by a comparison of its own.
        where += f" AND {order[0]} >= :after0 AND ({', '.join(order)}) > (:after0, :after1, :after2, :after3)"
        values |= {f"after{number}": value for number, value in enumerate(_place(after))}
    by = f"ORDER BY {', '.join(order)} LIMIT {ROWS_A_PAGE}"
    found = database.execute(f"SELECT {_COLUMNS} {_FROM} WHERE {where} {by}", values)
    return int(total), [_row(*each) for each in found]


def _place(text: str) -> list[float | str]:
    """Return the sort values (`_ORDER`) in the text of a place."""
    *numbers, identity = text.split(" ", 3)
    try:
        rating, logprob, moment = map(float, numbers)
    except ValueError:
        raise UsageError("the page address has an invalid position", hint="open the page Review again") from None
    return [rating, logprob, moment, identity]


def _row(identity: str, source: str, agent: str | None, moment: float | None, *more: Any) -> ReviewRow:
    rating, text, aside, reason = more
    row = json.loads(text)
    messages, logprob = row.get("messages"), row.get("logprob")
    logprob = logprob if isinstance(logprob, int | float) else None
    chat = [turn for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    last = chat[-1] if chat else {}
    is_answer, state = last.get("role") == "assistant", _state(row, rating, is_aside=aside is not None)
    turns = [(str(turn.get("role", "")), _shown(turn), False) for turn in chat]
    # Only the last answer of a chat is rated; earlier turns are its context.
    if is_answer and state.startswith("trained"):
        turns[-1] = (*turns[-1][:2], True)
    if isinstance(rejected := row.get("rejected_answer"), dict):
        turns.append(("answer before", _shown(rejected), False))
    return ReviewRow(
        id=identity,
        source=source,
        agent=agent or "",
        time=moment,
        certainty=None if logprob is None else math.exp(logprob),
        is_aside=aside is not None,
        turns=tuple(turns or [("row", _marked(json.dumps(row, ensure_ascii=False, indent=1)), False)]),
        state=state,
        answer=(last.get("content") or "") if is_answer and isinstance(last.get("content"), str | None) else None,
        reason=reason or "",
        place=f"{rating or 0.0!r} {1.0 if logprob is None else logprob!r} {-(moment or 0.0)!r} {identity}",
    )


def _state(row: Mapping[str, Any], rating: float | None, *, is_aside: bool) -> str:
    if is_aside:
        return "not trained: a person set it aside"
    if "rejected_answer" in row:
        return "trained: corrected"
    if rating:
        return "trained: rated up" if rating > 0 else "not trained as a good answer: rated down"
    if row.get("answered_by"):
        return "not trained: a release answered, and nobody approved it"
    return "trained, unless a check says otherwise"


def _shown(turn: Mapping[str, Any]) -> Markup:
    content = turn.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    return _marked(text + (json.dumps(turn["tool_calls"], ensure_ascii=False) if turn.get("tool_calls") else ""))


def _marked(text: str) -> Markup:
    """Return a text as HTML, cut for display, with redactions marked."""
    shown = text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " ..."
    return Markup(_REDACTED.sub(lambda found: f"<mark>{found[0]}</mark>", str(escape(shown))))


def newest_acts(database: sqlite3.Connection, count: int = 10) -> list[tuple[int, str, str, str, float]]:
    """Return number, interaction, action, author and time of the newest actions that were not undone."""
    query = "SELECT number, interaction, act, by, time FROM acts WHERE undone IS NULL ORDER BY number DESC LIMIT ?"
    return database.execute(query, (count,)).fetchall()


def do_act(database: sqlite3.Connection, identity: str, act: str, correction: str, *, by: str) -> None:
    """Rate, correct or set aside a row, and record the action with the previous state. Raises NotThere, UsageError."""
    if act not in ACTS:
        raise UsageError(f"unknown act {act!r}", hint=f"choose one of: {', '.join(ACTS)}")
    with transaction(database):
        row, aside = _stored(database, identity)
        changed = row
        if act == "correct":
            changed = correct_row(row, correction)
        elif act != "aside":
            changed = rate_row(row, "up" if act == "up" else "down")
        _write(database, identity, changed, aside != (act == "aside"), by)
        # The whole row as it was: an undo needs no rule for each act.
        columns, before = "interaction, act, by, time, before", json.dumps({"row": row, "aside": aside})
        values = (identity, act, by, time.time(), before)
        database.execute(f"INSERT INTO acts ({columns}) VALUES (?, ?, ?, ?, ?)", values)


def undo_newest(database: sqlite3.Connection, number: int | None = None) -> str:
    """Undo an action, by default the newest, and return the id of its row. Raises UsageError if there is none."""
    with transaction(database):
        # With it the later acts on the same row: what was before this act was before them too.
        which = "SELECT coalesce(?, max(number)) FROM acts WHERE undone IS NULL"
        of_its_row = f"number >= ({which}) AND interaction = (SELECT interaction FROM acts WHERE number = ({which}))"
        query = f"SELECT number, interaction, before FROM acts WHERE undone IS NULL AND {of_its_row} ORDER BY number"
        found = database.execute(query, (number, number)).fetchall()
        if not found:
            raise UsageError("there is nothing to undo")
        identity, before = str(found[0][1]), json.loads(found[0][2])
        _write(database, identity, before["row"], before["aside"], who())
        undone = [(time.time(), act) for act, _, _ in found]
        database.executemany("UPDATE acts SET undone = ? WHERE number = ?", undone)
    return identity


def _write(database: sqlite3.Connection, identity: str, row: Mapping[str, Any], aside: bool, by: str) -> None:
    # By its content: copies that were collected from elsewhere, or come again, are set aside with it.
    query = "SELECT content_id FROM interactions WHERE id = ?"
    (content,) = database.execute(query, (identity,)).fetchone()
    change_row(database, identity, row, row.get("feedback"))
    if aside:
        database.execute("INSERT OR IGNORE INTO set_aside VALUES (?, ?, ?)", (content, by, time.time()))
    else:
        database.execute("DELETE FROM set_aside WHERE content_id = ?", (content,))


def _stored(database: sqlite3.Connection, identity: str) -> tuple[dict[str, Any], bool]:
    """Return a stored interaction as (row, whether it is set aside). Raises NotThere."""
    query = "SELECT i.row, aside.time FROM interactions i LEFT JOIN set_aside aside USING (content_id) WHERE i.id = ?"
    found = database.execute(query, (identity,)).fetchone()
    if found is None:
        raise NotThere("no stored row has this id", hint="it may have been forgotten")
    return json.loads(found[0]), found[1] is not None


def act_on_row(form: Mapping[str, str]) -> ReviewRow:
    """Perform the action of a form, and return the row afterwards. Raises NotThere, UsageError."""
    with closing(open_database()) as database:
        if form.get("act") == "undo":
            number = form.get("number", "")
            identity = undo_newest(database, int(number) if number.isdecimal() and len(number) <= 9 else None)
        else:
            identity = form.get("id", "")
            do_act(database, identity, form.get("act", ""), form.get("correction", ""), by=who())
        return _row(*database.execute(f"SELECT {_COLUMNS} {_FROM} WHERE i.id = ?", (identity,)).fetchone())
