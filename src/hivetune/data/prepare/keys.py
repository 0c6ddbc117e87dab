"""The keys of a row that tie it to others: hashes of its question, session and text."""

from collections.abc import Sequence
from hashlib import blake2b

from hivetune.records import Message

SALT = b"hivetune split 1"


def question(messages: Sequence[Message]) -> str:
    """Return all text before the first answer without system prompts; of plain text its beginning."""
    texts = []
    for message in messages:
        if message.role == "assistant":
            break
        if message.role != "system":
            texts.append(" ".join(message.content.split()).casefold())
    return "\n".join(texts) if texts else messages[0].content[:200]


def read_hash(messages: Sequence[Message]) -> int:
    """Return a 64-bit hash of all text except answers."""
    read = [f"{m.role} {m.content}" for m in messages if m.role != "assistant"]
    return group_hash("read:" + "\n".join(read or [messages[0].content]))


def group_hash(key: str) -> int:
    """Return a uniform 64-bit hash of `key`."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=SALT).digest(), "little")
