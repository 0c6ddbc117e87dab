"""A prompt and its completion, as TRL and older fine-tuning files have it.

https://huggingface.co/docs/trl/dataset_formats#prompt-completion
"""

from hivetune.data.columns import ANSWERED, ASKED
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.pairs import EXPLAINED, read_pair, read_parties
from hivetune.data.pieces.said import Conversation, Row, first_of


def recognise(row: Row) -> bool:
    return "prompt" in row and first_of(row, ANSWERED) is not None


def rows(row: Row) -> Conversation:
    name = "prompt-completion"
    return read_parties(name, row, "prompt") or read_pair(name, row, ("prompt", *ASKED), ANSWERED)


FORMAT = Format(
    "prompt-completion",
    recognise,
    rows,
    needs=frozenset(("prompt",)),
    rank=24,
    explains=EXPLAINED | {"prompt", "completion"},
)
