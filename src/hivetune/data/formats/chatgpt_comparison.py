"""Two answers of ChatGPT that the user compared (`model_comparisons.json` of the export).

https://help.openai.com/en/articles/7260999-how-do-i-export-my-chatgpt-history-and-data
"""

from typing import Any

from hivetune.data.formats.chatgpt import read_chatgpt_turn
from hivetune.data.pieces.branches import done, said_in_chat
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, listed, one_of


def recognise(row: Row) -> bool:
    return None not in _comparison(row)


def rows(row: Row) -> Conversation:
    """Return the conversation with the answer that was preferred: the new one where both are rated the same (the user
    asked for it because the first was cut, or no better), the first one where the user did not compare them.
    """
    asked, compared = _comparison(row)
    better = "original" if one_of(compared, "completion_comparison_rating") in ("original", "skip") else "new"
    *answer, last = listed(one_of(compared, f"{better}_turn")) or [None]
    if one_of(last, "end_turn") is False:  # nothing follows that could end it
        last = {**last, "status": "in_progress"}
    read, cut = said_in_chat([*listed(one_of(asked, "messages")), *answer, last], read_chatgpt_turn)
    return done("chatgpt-comparison", read, 1, cut)


def _comparison(row: Row) -> tuple[Any, Any]:
    """Return (the conversation, how its answers were compared); newer exports have both in `content`."""
    record = row.get("content", row)
    return one_of(one_of(record, "input"), "prompt_convo"), one_of(one_of(record, "output"), "feedback_step_2")


FORMAT = Format("chatgpt-comparison", recognise, rows, needs=frozenset(("input", "content")))
