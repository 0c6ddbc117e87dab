"""A span of OpenAI's agents: `span_data` with its type, input and output.

https://openai.github.io/openai-agents-python/tracing/
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names
from hivetune.data.pieces.spans import read_step
from hivetune.data.reasons import RowRefused


def read(row: Row) -> Conversation | None:
    data = row["span_data"]
    if not isinstance(data, dict):
        return None
    if data.get("type") not in ("generation", "response"):
        raise RowRefused("not-a-model-call", f"a span of type {str(data.get('type'))[:40]}")
    if row.get("error"):
        raise RowRefused("failed", f"the call failed: {str(row['error'])[:80]}")
    return read_step("openai-agents", {key: data.get(key) for key in ("input", "output")}, None, is_call=True)


FORMAT = Format("openai-agents", read, needs=names("span_data"), rank=10, explains=names("span_data"))
