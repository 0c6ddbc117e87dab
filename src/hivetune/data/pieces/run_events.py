"""Events in the life of a run, as logs with one event a line name them."""

import re

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Row

# What happened in the life of a run, in logs with one event a line. Other columns than these hold classes, such as
# "front-end", so there the event says too of what it is one.
_EVENT_COLUMNS = ("event", "event_type", "event_name")
_KIND_COLUMNS = ("type", "kind")
_HAPPENED = "(?:start|started|begin|end|ended|error|complete|completed|finish|finished|delta|chunk|stream|token)"
_EVENT = re.compile(rf"(?:[a-z0-9_]+_)?{_HAPPENED}")
_EVENT_OF_A_RUN = re.compile(
    r"(?:on_|handle_)?(?:llm|chat|chat_model|model|chain|tool|agent|retriever|run|message|response|generation)"
    rf"_(?:new_)?{_HAPPENED}"
)
_MAX_EVENT_CHARS = 60


def event_in(row: Row) -> str | None:
    """The plain name of the event of a run that a row is; None: it is no such event."""
    for columns, known in ((_EVENT_COLUMNS, _EVENT), (_KIND_COLUMNS, _EVENT_OF_A_RUN)):
        for column in columns:
            value = row.get(column)
            if isinstance(value, str) and len(value) <= _MAX_EVENT_CHARS and known.fullmatch(name := plain_name(value)):
                return name
    return None
