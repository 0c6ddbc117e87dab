"""Slack's export: a folder for each channel with a file for each day, and beside these users.json. A thread is one
conversation, over as many days as it lasts; messages outside threads form one for each day. Who answers is
`--columns assistant=NAME`.

https://slack.com/help/articles/220556107-How-to-read-Slack-data-exports
"""

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from hivetune.data.columns import as_number
from hivetune.data.pieces.format import Head, Lines, Log, PlacedRow
from hivetune.data.pieces.sessions import TableTurn, Threads, events
from hivetune.data.pieces.values import listed, one_of

USERS = "users.json"  # beside the folders of the channels
# Files of an export that hold no messages.
METADATA = frozenset(
    (USERS, "channels.json", "groups.json", "dms.json", "mpims.json", "integration_logs.json", "canvases.json")
) | {"lists.json", "file_conversations.json", "huddle_transcripts.json", "org_users.json", "external_channels.json"}
_SPOKEN = (
    None,
    "bot_message",
    "thread_broadcast",
    "me_message",
    "file_share",
)  # the others are the program's notes
_DAY = re.compile(r"\d{4}-\d\d-\d\d\.json")
_LINK = re.compile(r"<([^<>|]+)(?:\|([^<>]*))?>")


def is_metadata(path: str) -> bool:
    """Return whether a file describes an export and contains no messages."""
    return os.path.basename(path) in METADATA and os.path.isfile(os.path.join(os.path.dirname(path), USERS))


def channel_of(path: str) -> str | None:
    """Return the folder of the channel that a file with a day's messages belongs to; None for any other file."""
    folder, name = os.path.split(path)
    if not _DAY.fullmatch(name):
        return None
    with open(path, "rb") as file:
        head = file.read(4096)
    return folder if head.lstrip()[:1] == b"[" and b'"ts"' in head and b'"message"' in head else None


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
        else:
            user = str(one_of(event, "user", "bot_id"))
            name = known.get(user) or one_of(event.get("user_profile"), "real_name", "display_name") or user
            known.setdefault(user, str(name))
            # What rests on a file can't be learned, with or without words; a program's message may be all parts.
            words = ("" if event.get("files") else plain_text(str(event["text"]), known)) or [{"type": "file"}]
            said = {"speaker": str(name), "content": words} if event.get("subtype") in _SPOKEN else None
            time, thread = as_number(event["ts"]), event.get("thread_ts")
            # Messages outside threads form a conversation for each day (UTC, as that of the file), without a name.
            day = "" if time is None else datetime.fromtimestamp(time, UTC).date().isoformat()
            threads.add(number, TableTurn(str(thread or day), said, time, {} if thread else {"session_id": None}))
    yield from threads.rows("slack")


def plain_text(text: str, names: Mapping[str, str]) -> str:
    """Return a message without Slack's markup: names instead of ids, text of links, characters instead of entities."""

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


@lru_cache(8)
def user_names(path: str) -> Mapping[str, str]:
    """Return user id -> name from a users.json; empty if it can't be read."""
    try:
        users = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    named = ((user, one_of(user.get("profile"), "real_name", "display_name")) for user in listed(users) if "id" in user)
    return {str(user["id"]): str(name or user.get("real_name") or user.get("name")) for user, name in named}


FORMAT = Log("slack", recognise, rows)
