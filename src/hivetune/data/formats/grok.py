"""Grok: the export of an account, `conversations` with their `responses`.

https://x.ai/legal/faq (download of the account's data: prod-grok-backend.json)
"""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects, one_of


def recognise(record: Row) -> bool:
    talks = objects(record.get("conversations")) or [dict(record)]
    return all(isinstance(one.get("conversation"), dict) and objects(one.get("responses")) is not None for one in talks)


def rows(record: Row) -> Iterator[Row]:
    for talk in objects(record.get("conversations")) or [dict(record)]:
        said = [one_of(one, "response") for one in objects(talk["responses"]) or []]
        messages = [_turn(one) for one in said if isinstance(one, dict)]
        yield {"session_id": talk["conversation"].get("id"), "messages": messages}


def _turn(said: dict[str, Any]) -> dict[str, Any]:
    return {"role": str(said.get("sender")).lower(), "content": said.get("message")}


FORMAT = Format("grok", recognise, rows, "batch", frozenset(("conversations", "responses")))
