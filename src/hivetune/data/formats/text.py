"""A text that is learned whole, or its turns where a template has written them (ChatML, Llama 3).

https://huggingface.co/docs/trl/dataset_formats#language-modeling
"""

from hivetune.data.columns import LABELS
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.rendered import has_marks, rendered_turns
from hivetune.data.pieces.said import Conversation, Row, names, text_of
from hivetune.data.pieces.turns import conversation_of, read_messages
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

# A text with one of these is a question or an answer whose other half stands elsewhere.
_HALVES = (
    *("question_id", "answer_id", "prompt_id", "response_id", "completion_id", "reply_to"),
    *("review_id", "reviewer_id", "answer1_id", "answer2_id", "_id"),  # the last: of a retrieval benchmark
)


def read(row: Row) -> Conversation | None:
    """Return a text that is learned whole, or its turns. Raise RowRefused for the marks of another template."""
    if str(row.get("type")).startswith("response."):
        return None  # a piece of a stream
    text = text_of(row["text"], "text")
    if (turns := rendered_turns(text, whole=True)) is not None:
        return conversation_of("text", read_messages(turns, None), changed=("turns-from-text",))
    if has_marks(text):
        raise RowRefused("rendered-text")
    return Conversation("text", (Message("assistant", text),))


_TEXT = names("text")
FORMAT = Format("text", read, needs=_TEXT, rank=35, explains=_TEXT, asks=frozenset((*LABELS, *_HALVES)))
