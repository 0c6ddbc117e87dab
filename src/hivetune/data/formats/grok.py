"""Grok: the export of an account, `conversations` with their `responses`.

https://x.ai/legal/faq (download of the account's data: prod-grok-backend.json)
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, names, objects, one_of


def rows(record: Row) -> Iterator[Row]:
    talks = objects(record.get("conversations")) or [dict(record)]
    if not all(isinstance(t.get("conversation"), dict) and objects(t.get("responses")) is not None for t in talks):
        return
    for talk in talks:
        said = [r for given in objects(talk["responses"]) or [] if isinstance(r := one_of(given, "response"), dict)]
        turns = [{"role": str(one_of(r, "sender")).lower(), "content": one_of(r, "message")} for r in said]
        yield {"session_id": talk["conversation"].get("id"), "messages": turns}


FORMAT = Batch("grok", rows, needs=names("conversations responses"))
