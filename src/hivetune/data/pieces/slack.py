"""Slack: a day of a channel in the workspace's export, a list of messages with `user`, `text` and `ts`. A thread is a
conversation; what stands in no thread is one for the day. Who answers is `--columns assistant=USER`.

https://slack.com/help/articles/220556107-How-to-read-Slack-data-exports
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hivetune.data.pieces.said import one_of


def is_message_of_slack(event: Mapping[str, Any]) -> bool:
    return event.get("type") == "message" and {"ts", "text"} <= event.keys() and bool({"user", "bot_id"} & event.keys())


def slack_threads(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    threads: dict[str, list[dict[str, str]]] = {}
    for one in messages:
        if one.get("text") and not one.get("subtype"):
            name = one_of(one.get("user_profile"), "real_name") or one_of(one, "user", "bot_id")
            turn = {"speaker": str(name), "content": str(one["text"])}
            threads.setdefault(str(one.get("thread_ts") or ""), []).append(turn)
    for thread, turns in threads.items():
        yield {"hivetune_session": "slack", "session_id": thread or None, "messages": turns}
