"""Grok: the export of an account, `conversations` with their `responses`.

https://x.ai/legal/faq (download of the account's data: prod-grok-backend.json)
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, names, objects, one_of


def recognise(record: Row) -> bool:
    talks = objects(record.get("conversations")) or [dict(record)]
    return all(isinstance(t.get("conversation"), dict) and objects(t.get("responses")) is not None for t in talks)


def rows(record: Row) -> Iterator[Row]:
    for talk in objects(record.get("conversations")) or [dict(record)]:
        said = [r for given in objects(talk["responses"]) or [] if isinstance(r := one_of(given, "response"), dict)]
        turns = [{"role": str(one_of(r, "sender")).lower(), "content": one_of(r, "message")} for r in said]
        yield {"session_id": talk["conversation"].get("id"), "messages": turns}


FORMAT = Format("grok", recognise, rows, "batch", needs=names("conversations responses"))
