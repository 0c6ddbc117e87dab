"""Slack's export: the messages of a channel and a day. A thread is a conversation; what stands in no thread is one for
the day. Who answers is `--columns assistant=NAME`.

https://slack.com/help/articles/220556107-How-to-read-Slack-data-exports
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import PlacedRow, conversation, events, is_row
from hivetune.data.pieces.said import one_of


def recognise(head: Head) -> bool:
    messages = [event for event in head.events if event.get("type") == "message" and {"ts", "text"} <= event.keys()]
    return len(head.events) == len(messages) > 1 and all({"user", "bot_id"} & event.keys() for event in messages)


def rows(lines: Lines) -> Iterator[PlacedRow]:
    threads: dict[str, tuple[int, list[dict[str, str]]]] = {}
    for number, event, text in events(lines):
        if event is None or is_row(event):
            yield number, text
        elif event.get("text") and not event.get("subtype"):
            name = one_of(event.get("user_profile"), "real_name") or one_of(event, "user", "bot_id")
            turn = {"speaker": str(name), "content": str(event["text"])}
            threads.setdefault(str(event.get("thread_ts") or ""), (number, []))[1].append(turn)
    for thread, (begin, turns) in threads.items():
        yield begin, conversation("slack", turns, session_id=thread)


FORMAT = Log("slack", recognise, rows)
