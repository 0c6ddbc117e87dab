"""A text that is learned whole, or its turns where speakers take turns in it.

https://huggingface.co/docs/trl/dataset_formats#language-modeling
"""

from hivetune.data.columns import LABELS
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.rendered import is_marked, is_rendered, spoken_turns, turns_of, without_end
from hivetune.data.pieces.said import Conversation, Row, names, text_of
from hivetune.data.pieces.transcripts import turns_behind_system, turns_in_text
from hivetune.data.pieces.turns import conversation_of, read_messages
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

# A text with one of these is a question or an answer whose other half stands elsewhere.
_HALVES = (
    *("question_id", "answer_id", "prompt_id", "response_id", "completion_id", "reply_to"),
    *("review_id", "reviewer_id", "answer1_id", "answer2_id", "_id"),  # the last: of a retrieval benchmark
)


def read(row: Row) -> Conversation | None:
    """Return a text that is learned whole, or its turns if speakers take turns in it. Raise RowRefused if a template
    wrote it and its turns are unclear.
    """
    if str(row.get("type")).startswith("response."):
        return None  # a piece of a stream
    text = text_of(row["text"], "text")
    turns = turns_of(text, whole=True)
    turns = spoken_turns(text) if turns is None else turns
    if turns == [] or (turns is None and is_marked(without_end(text, ""))):
        raise RowRefused("rendered-text")
    turns = turns or turns_in_text(text) or turns_behind_system(text)
    if turns is None and is_rendered(text):
        raise RowRefused("rendered-text")
    if turns is None:
        return Conversation("text", (Message("assistant", text),))
    return conversation_of("text", read_messages(turns, None), changed=("turns-from-text",))


_TEXT = names("text")
FORMAT = Format("text", read, needs=_TEXT, rank=35, explains=_TEXT, asks=frozenset((*LABELS, *_HALVES)))
