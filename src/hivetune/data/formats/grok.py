"""Grok: the export of an account, `conversations` with their `responses`.

https://x.ai/legal/faq (download of the account's data: prod-grok-backend.json)
"""

from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects, one_of


def recognise(record: Row) -> bool:
    talks = objects(record.get("conversations")) or [dict(record)]
    return all(isinstance(t.get("conversation"), dict) and objects(t.get("responses")) is not None for t in talks)


def rows(record: Row) -> Iterator[Row]:
    for talk in objects(record.get("conversations")) or [dict(record)]:
        responses = [one_of(response, "response") for response in objects(talk["responses"]) or []]
        messages = [_turn(response) for response in responses if isinstance(response, dict)]
        yield {"session_id": talk["conversation"].get("id"), "messages": messages}


def _turn(response: dict[str, Any]) -> dict[str, Any]:
    return {"role": str(response.get("sender")).lower(), "content": response.get("message")}


FORMAT = Format("grok", recognise, rows, "batch", frozenset(("conversations", "responses")))
