"""Which rows are trained and which are held out, decided by each row alone.

A row's split is a function of the hash of its group (session, user, or else its own question). So everything of one
conversation, and every answer to one question, is on one side; each agent and category gets the same expected shares;
and rows that are added later never move an old row. The price: shares are exact only on average.
"""

from collections.abc import Sequence
from hashlib import blake2b

from hivetune.records import Example, Message, Split

SALT = b"hivetune split 1"
SCALE = 1 << 64


def group_key(example: Example, group_by: str) -> str:
    """What must stay together: "session:...", "user:..." or the question itself.

    A row without the wanted name falls back to its question, so that a question is never asked on both sides.
    """
    if group_by in ("auto", "session") and example.session:
        return f"session:{example.session}"
    if group_by == "user" and example.user:
        return f"user:{example.user}"
    return "question:" + question(example.messages)


def question(messages: Sequence[Message]) -> str:
    """Everything that is said before the first answer, without the system prompt; for plain text its beginning."""
    asked = []
    for message in messages:
        if message.role == "assistant":
            break
        if message.role != "system":
            asked.append(" ".join(message.content.split()).casefold())
    return "\n".join(asked) if asked else messages[0].content[:200]


def group_hash(key: str) -> int:
    """64 bits of `key`, uniform."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=SALT).digest(), "little")


def split_of(hash64: int, validation: float, test: float) -> Split:
    """The split of a group. Shares are those of DataConfig; the rest is trained."""
    place = hash64 / SCALE
    if place < test:
        return "test"
    return "validation" if place < test + validation else "train"
