"""What makes a row unfit to learn from: small pure functions, each with one reason.

A check takes the messages of one row and raises RowRefused, or returns None. They run in the order of CHECKS, from
shape to content, and the first that refuses gives the row's one reason. docs/data-checks.md lists them all.
"""

import json
import re
import zlib
from collections.abc import Callable, Sequence

from hivetune.data.checks.mojibake import mojibake, repaired, repaired_words
from hivetune.data.reasons import RowRefused, not_utf8
from hivetune.records import Message

Messages = Sequence[Message]

# Compressed to less than this share, an answer is looked at closely. Measured: prose and code 0.4 to 0.9, the answers
# in Python's documentation not below 0.3, loops below 0.15.
LOOP_RATIO = 0.25
ZLIB_OVERHEAD_BYTES = 12
LOOP_MIN_CHARS = 100
LOOP_MIN_REPEATS = 6
MAX_REPEATED = 0.1  # of the answers of a conversation, that say the question again
OVERLAP_CHARS = 40  # at least, of a question's end that the answer begins with
LOOP_MAX_PERIOD = 300
# A loop over half of a text holds the characters in front of the middle or those behind it, and a copy of them at most
# one period away. With more of them the copy may lie outside: two periods and these are never more than a loop is long.
LOOP_PROBE_CHARS = 32
LOOP_WINDOW = 8192  # characters to each side of the middle of a long text, looked at before all of it
_WORD = re.compile(r"\w+")
_NUMBER_NAMES = (
    "six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
)
_NUMBER_WORDS = {name: str(n) for n, name in enumerate(_NUMBER_NAMES.split(), LOOP_MIN_REPEATS)}
_LOST_WORDS = re.compile(r"(?:(?<!\S)\?+[.,;:!|-]*\s+){5,}\?+")
MAX_CHARS_WITHOUT_MODEL = 1_000_000  # about 250,000 tokens, the window of the longest usual models


def check_roles(messages: Messages) -> None:
    """User and assistant in turn; tool results follow the call they answer; system turns stand anywhere but last.

    Whether the template has a place for a system turn inside the conversation is for the template to say.
    """
    if not messages:
        raise RowRefused("no-messages")
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
            raise RowRefused("role-order", f"message {i + 1}: {role} after {previous}")
        previous = role
    if not any(message.role == "assistant" for message in messages):
        raise RowRefused("no-answer")
    if previous != "assistant":
        raise RowRefused("role-order", f"the last message is the {previous}'s: nothing answers it")


def check_empty(messages: Messages) -> None:
    for message in messages:
        if message.content.strip():
            continue
        if message.role == "assistant" and not message.tool_calls:
            raise RowRefused("empty-answer")
        if message.role == "user":
            raise RowRefused("empty-question")


def check_characters(messages: Messages) -> None:
    """NUL, halves of characters, lost bytes, wrongly decoded text."""
    for i, message in enumerate(messages):
        text = message.content if message.reasoning is None else f"{message.reasoning}\n{message.content}"
        if "?? ?" in text and message.role != "tool" and _letters_are_lost(text):
            raise RowRefused(
                "replacement-character", "words of question marks stand where letters were: encode as UTF-8"
            )
        if text.isascii():
            if "\0" in text:
                raise RowRefused("nul-byte")
            continue
        if "\0" in text:
            raise RowRefused("nul-byte")
        if "\ufffd" in text and message.role != "tool":  # what a tool really printed is read as it is
            raise RowRefused("replacement-character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ord(text[error.start])
            if 0xDC80 <= half <= 0xDCFF:  # a byte that was no UTF-8, as reading CSV and JSON files keeps it
                raise not_utf8(half - 0xDC00, text[: error.start]) from None
            raise RowRefused("lone-surrogate") from None
        found = mojibake(text) if message.role != "tool" else None
        if found and not _is_quoted(text, messages[i:]):
            raise RowRefused("mojibake", f"{found!r} was {repaired(found)!r}: read the source as UTF-8")


def _is_quoted(text: str, messages: Messages) -> bool:
    """Whether each wrongly decoded word of a text stands rightly decoded in it too, or in the answer to it: somebody
    speaks of wrong decoding. A text that was decoded wrongly is so from its beginning to its end.
    """
    answer = next((message.content for message in messages if message.role == "assistant"), "")
    right = set(_WORD.findall(f"{text}\n{answer}"))
    return all(set(_WORD.findall(fixed)) <= right for fixed in repaired_words(text))


def _letters_are_lost(text: str) -> bool:
    """Whether words of question marks alone, of several lengths, stand in a row: their letters had no place in the
    encoding that the text was written in.
    """
    return any(len({len(word) for word in run.split()}) > 1 for run in _LOST_WORDS.findall(text))


def check_answers(messages: Messages) -> None:
    """Answers that teach nothing: the question again, or a loop. A long conversation may hold a few of the former."""
    asked = ""
    repeated = answers = 0
    for message in messages:
        if message.role == "user":
            asked = message.content
        elif message.role == "assistant":
            answer = message.content
            answers += 1
            if len(answer) == len(asked) or abs(len(answer) - len(asked)) < 16:  # cheap before folding case
                same = answer and answer.strip().casefold() == asked.strip().casefold()
                repeated += bool(same)
            if _goes_on_with(asked, answer):
                raise RowRefused("answer-is-question", "the question's end comes again as the answer's beginning")
            if len(answer) >= LOOP_MIN_CHARS and has_loop(answer) and not _is_asked_for(asked, answer):
                raise RowRefused("repeated-loop")
    if repeated > answers * MAX_REPEATED:
        raise RowRefused("answer-is-question")


def _goes_on_with(asked: str, answer: str) -> bool:
    """Whether running text was cut into overlapping pieces: the question ends with the answer's beginning, in the
    middle of a line. A text to be completed begins behind a line's end, a colon, a quote or a sentence.
    """
    start = asked.find(answer[:OVERLAP_CHARS]) if len(answer) > OVERLAP_CHARS else -1
    if start < 2 or asked[start - 1] != " " or not (asked[start - 2].isalnum() or asked[start - 2] in ",;"):
        return False
    shared = asked[start:]
    return "\n" not in shared and len(shared) < len(answer) and answer.startswith(shared)


def has_loop(text: str) -> bool:
    """Whether one piece, repeated at least six times in a row, makes up half of `text` (or all of its end)."""
    if not _middle_comes_again(text):
        return False
    encoded = text.encode("utf-8", "surrogatepass")
    if len(zlib.compress(encoded, 1)) - ZLIB_OVERHEAD_BYTES > LOOP_RATIO * len(encoded):
        return False
    middle = len(text) // 2  # what makes up half of a text lies in its middle too, and fills half of any window there
    if len(text) > 4 * LOOP_WINDOW and not has_loop(text[middle - LOOP_WINDOW : middle + LOOP_WINDOW]):
        return False
    for period in range(1, min(LOOP_MAX_PERIOD, len(text) // LOOP_MIN_REPEATS) + 1):
        if _longest_repeat(text, period) >= max(len(text) // 2, period * LOOP_MIN_REPEATS, LOOP_MIN_CHARS):
            return True
    return False


def _is_asked_for(asked: str, answer: str) -> bool:
    """Whether an answer is one piece as often as a number in the question says, and nothing else."""
    words = _WORD.findall(asked.lower())
    for number in {_NUMBER_WORDS.get(word, word) for word in words}:
        if not (number.isdecimal() and len(number) < 4 and int(number) >= LOOP_MIN_REPEATS):
            continue
        for text in (answer, answer.strip() + "\n", answer.strip() + " "):
            size, rest = divmod(len(text), int(number))
            if not rest and text == text[:size] * int(number) and not _repeats(text[:size].strip()):
                return True
    return False


def _repeats(piece: str) -> bool:
    """Whether a piece is itself a piece several times, so that a loop of 240 is no loop of 20."""
    return any((piece + gap + piece).find(piece, 1) <= len(piece) for gap in (" ", "\n"))


def _middle_comes_again(text: str) -> bool:
    """Whether there is a copy of what stands beside the middle within the longest period: a twentieth of the time of
    compressing the text."""
    middle = len(text) // 2
    for start in (middle - LOOP_PROBE_CHARS, middle + 1):
        probe = text[start : start + LOOP_PROBE_CHARS]
        before = text.find(probe, max(0, start - LOOP_MAX_PERIOD), start + LOOP_PROBE_CHARS - 1)
        if before >= 0 or text.find(probe, start + 1, start + LOOP_MAX_PERIOD + LOOP_PROBE_CHARS) >= 0:
            return True
    return False


def _longest_repeat(text: str, period: int) -> int:
    """Length of the longest stretch of `text` that repeats with `period`, found in steps of the whole stretch."""
    best = position = 0
    while position + period * LOOP_MIN_REPEATS <= len(text):
        unit = text[position : position + period]
        end = position + period
        while text.startswith(unit, end):
            end += period
        if end - position > best and unit.strip(" -=_*#.\n\t"):  # rulers and blank space are no loops
            best = end - position
        position = max(end - period + 1, position + 1) if end - position > period else position + period
    return best


def check_length(messages: Messages) -> None:
    """Without a model there are no tokens to count."""
    num_chars = sum(len(message.content) for message in messages)
    if num_chars > MAX_CHARS_WITHOUT_MODEL:
        raise RowRefused("too-long-characters", f"{num_chars:,} characters, the limit is {MAX_CHARS_WITHOUT_MODEL:,}")


def check_message_weights(messages: Messages) -> None:
    if not any(message.weight for message in messages if message.role == "assistant"):
        raise RowRefused("no-trained-token", "every answer has the weight 0")


def control_token_check(tokens: Sequence[str]) -> Callable[[Messages], None]:
    """A check that no text holds one of these control tokens."""
    pattern = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")

    def check_control_tokens(messages: Messages) -> None:
        for message in messages:
            found = pattern.search(message.content) or pattern.search(message.reasoning or "")
            if found is None and message.tool_calls:
                found = pattern.search(json.dumps([dict(call) for call in message.tool_calls], ensure_ascii=False))
            if found:
                raise RowRefused("control-token", f"delete {found.group()!r} from the text")

    return check_control_tokens


CHECKS: tuple[Callable[[Messages], None], ...] = (
    check_roles,
    check_empty,
    check_characters,
    check_message_weights,
    check_answers,
)


def check_messages(messages: Messages, checks: Sequence[Callable[[Messages], None]] = CHECKS) -> None:
    """Run every check. Raises RowRefused with the first reason."""
    for one in checks:
        one(messages)
