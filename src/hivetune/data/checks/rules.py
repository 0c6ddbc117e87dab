"""The checks of a row's messages. Each raises RowRefused with one reason, or returns None.

They run in the order of CHECKS, from shape to content; the first refusal is the row's reason. docs/data-checks.md lists
all reasons.
"""

import json
import re
from collections.abc import Callable, Sequence

from hivetune.data.reasons import RowRefused, not_encodable
from hivetune.records import Message

# The signs of UTF-8 that was decoded as Windows-1252: é as Ã©, a quotation mark as â€œ. A text may quote them, so they
# are counted and refuse nothing.
MOJIBAKE = re.compile("Ã[\u0080-\u00bf\u0152\u0160\u0178\u017d\u0192\u2018-\u201e\u2020-\u2026\u2030\u20ac]|â€")
Messages = Sequence[Message]

MAX_CHARS = 1_000_000  # about 250,000 tokens, the window of the longest usual models


def check_roles(messages: Messages) -> None:
    """Check that user and assistant alternate, that tool results follow a call, and that no system turn is the last.

    A system turn in the middle of a conversation is refused later, if the model's template can't render it.
    """
    if not messages:
        raise RowRefused("empty-turn", "the list of messages is empty: fill it in or delete the row")
    if len(messages) == 1 and messages[0].role == "assistant":
        return  # plain text
    previous = "start"
    calls_open = False
    for i, message in enumerate(messages):
        role = message.role
        if role == "system":
            if i + 1 < len(messages):
                continue
            fits = False
        elif role == "user":
            fits = previous in ("start", "assistant", "tool")
        elif role == "assistant":
            fits = previous in ("user", "tool")
            calls_open = bool(message.tool_calls)
        else:
            fits = (previous == "assistant" and calls_open) or previous == "tool"
        if not fits:
            lacks = (
                ", which has no tool_calls: write the call there" if (role, previous) == ("tool", "assistant") else ""
            )
            raise RowRefused("role-order", f"message {i + 1}: {role} after {previous}{lacks}")
        previous = role
    if not any(message.role == "assistant" for message in messages):
        raise RowRefused("empty-turn", "the row has no answer of the assistant: add it, or delete the row")
    if previous != "assistant":
        raise RowRefused("role-order", f"the last message is the {previous}'s: add an answer to it")


def check_empty(messages: Messages) -> None:
    """Check that every question has a text, and every answer a text or a tool call."""
    for message in messages:
        if message.content.strip():
            continue
        if message.role == "assistant" and not message.tool_calls:
            raise RowRefused("empty-turn", "the answer has no text: fill it in or delete the row")
        if message.role == "user":
            raise RowRefused("empty-turn", "the question has no text: fill it in or delete the row")


def check_characters(messages: Messages) -> None:
    """Check for NUL, lone surrogates and lost letters (U+FFFD)."""
    for message in messages:
        text = message.content if message.reasoning is None else f"{message.reasoning}\n{message.content}"
        if "\0" in text:
            raise RowRefused("bad-characters", "the text has a NUL byte: part of the file is lost, or it is binary")
        if text.isascii():
            continue
        if "\ufffd" in text and message.role != "tool":  # a tool may really have printed it
            raise RowRefused(
                "bad-characters",
                "the text has U+FFFD, which replaces bytes that were lost in decoding: decode the source again",
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise not_encodable(error) from None


def has_mojibake(messages: Messages) -> bool:
    """Return whether a text seems to be UTF-8 that was decoded as Windows-1252."""
    return any(not m.content.isascii() and MOJIBAKE.search(m.content) for m in messages)


def check_length(messages: Messages) -> None:
    """Check that the row is not longer than MAX_CHARS, before other checks read its text."""
    num_chars = sum(len(message.content) for message in messages)
    if num_chars > MAX_CHARS:
        raise RowRefused("too-long", f"the row has {num_chars:,} characters, the limit is {MAX_CHARS:,}: split it")


def check_message_weights(messages: Messages) -> None:
    """Check that at least one answer has a weight above 0."""
    if not any(message.weight for message in messages if message.role == "assistant"):
        raise RowRefused("no-trained-token", "every answer has the weight 0: give one the weight 1")


def control_token_check(tokens: Sequence[str]) -> Callable[[Messages], None]:
    """Return a check that no text contains one of these control tokens."""
    pattern = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")

    def check_control_tokens(messages: Messages) -> None:
        for message in messages:
            match = pattern.search(message.content) or pattern.search(message.reasoning or "")
            if match is None and message.tool_calls:
                match = pattern.search(json.dumps([dict(call) for call in message.tool_calls], ensure_ascii=False))
            if match:
                raise RowRefused("control-token", f"delete {match.group()!r} from the text")

    return check_control_tokens


CHECKS: tuple[Callable[[Messages], None], ...] = (
    check_length,
    check_roles,
    check_empty,
    check_characters,
    check_message_weights,
)


def check_messages(messages: Messages, checks: Sequence[Callable[[Messages], None]] = CHECKS) -> None:
    """Run every check. Raise RowRefused with the first reason."""
    for check in checks:
        check(messages)
