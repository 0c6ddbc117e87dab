"""Slack's export: a folder for each channel with a file for each day, and beside these users.json. A thread is one
conversation, over as many days as it lasts; what stands in no thread is one for each day. Who answers is
`--columns assistant=NAME`.

https://slack.com/help/articles/220556107-How-to-read-Slack-data-exports
"""

import html
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from hivetune.data.pieces.fields import as_number
from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import PlacedRow, Threads, conversation, events
from hivetune.data.pieces.said import one_of

_SPOKEN = (None, "bot_message", "thread_broadcast", "me_message")  # other subtypes are notes of the program
_LINK = re.compile(r"<([^<>|]+)(?:\|([^<>]*))?>")


def recognise(head: Head) -> bool:
    messages = [event for event in head.events if event.get("type") == "message" and {"ts", "text"} <= event.keys()]
    return len(head.events) == len(messages) > 0 and all({"user", "bot_id"} & event.keys() for event in messages)


def rows(lines: Lines, names: Mapping[str, str] | None = None) -> Iterator[PlacedRow]:
    """Yield one row for each thread and for each day's other messages. `names`: of users, by their ids."""
    threads = Threads()
    known = dict(names or {})
    for number, event, text in events(lines):
        if event is None or not {"ts", "text"} <= event.keys():
            yield number, text
        elif event["text"] and event.get("subtype") in _SPOKEN:
            user = str(one_of(event, "user", "bot_id"))
            name = known.get(user) or one_of(event.get("user_profile"), "real_name", "display_name") or user
            known.setdefault(user, str(name))
            said = {"speaker": str(name), "content": plain_text(str(event["text"]), known)}
            threads.add(_thread(event), number, said, as_number(event["ts"]))
    for thread, begin, turns in threads.conversations():
        yield begin, conversation("slack", turns, session_id=thread if "." in thread else None)


def _thread(event: Mapping[str, Any]) -> str:
    """Return the thread of a message; else its day, UTC, as that of the file that it stands in."""
    time = as_number(event["ts"])
    day = "" if time is None else datetime.fromtimestamp(time, UTC).date().isoformat()
    return str(event.get("thread_ts") or day)


def plain_text(text: str, names: Mapping[str, str]) -> str:
    """Return a message without Slack's markup: names for ids, the words of links, and signs for entities."""

    def words(match: re.Match[str]) -> str:
        what, label = match[1], match[2]
        if what[0] == "@":
            return f"@{names.get(what[1:]) or label or what[1:]}"
        if what[0] == "#":
            return f"#{label or what[1:]}"
        if what[0] == "!":
            return label or f"@{what[1:].partition('^')[0]}"
        return what if not label or label == what else f"{label} ({what})"

    return html.unescape(_LINK.sub(words, text))


FORMAT = Log("slack", recognise, rows)
