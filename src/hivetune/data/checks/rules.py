"""The checks of a row's messages. Each raises RowRefused with one reason, or returns None.

They run in the order of CHECKS, from shape to content; the first refusal is the row's reason. docs/data-checks.md lists
all reasons.
"""

import json
import re
import zlib
from collections.abc import Callable, Sequence

from hivetune.data.reasons import RowRefused, not_utf8
from hivetune.records import Message

# Mojibake: UTF-8 that was decoded as Windows-1252, such as Ã© for é. `CAFÉ”` and `SÃO»` are correct text whose bytes
# also happen to be UTF-8. Wrong text has a sign where no language puts one, such as a currency sign inside a word.
# CP1252 has the characters at 0x80 to 0x9F of Windows-1252.
CP1252 = "€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
# The first bytes of two (Latin, Greek, Cyrillic, Hebrew, Arabic), three and four bytes. First bytes of rare letters are
# missing: É, È and Ç would stand for phonetic signs.
PIECE = re.compile(
    f"[ÂÃÄÅÆÎÏÐÑ×ØÙÚÛ][\u0080-\u00bf{CP1252}]|[à-ï][\u0080-\u00bf{CP1252}]{{2}}|[ð-ô][\u0080-\u00bf{CP1252}]{{3}}"
)
# Characters that follow the last letter of a word in correct text.
CLOSING = frozenset("”’“‘…–—»«›‹\u00a0")


def mojibake(text: str) -> str | None:
    """Return the first piece of `text` that is UTF-8 decoded as Windows-1252, or None."""
    for match in PIECE.finditer(text):
        if repaired(match.group()) is not None and not _natural(text, match.start(), match.end()):
            return match.group()
    return None


def repaired_words(text: str) -> list[str]:
    """Return the words of `text` that have wrongly decoded pieces, each rightly decoded."""
    broken = [word for word in re.split(r"[ \t\r\n]+", text) if mojibake(word) is not None]
    return [PIECE.sub(lambda match: repaired(match.group()) or match.group(), word) for word in broken]


def repaired(piece: str) -> str | None:
    """Return the character that `piece` was, or None. Bytes that Windows-1252 leaves undefined are read as Latin-1."""
    raw = b"".join(c.encode("cp1252") if c in CP1252 else c.encode("latin-1", "replace") for c in piece)
    try:
        decoded = raw.decode()
    except UnicodeDecodeError:
        return None
    return decoded if len(decoded) == 1 and (decoded.isprintable() or decoded.isspace()) else None


def _natural(text: str, start: int, end: int) -> bool:
    """Return whether a word ends so in correct text: a letter and closing punctuation, and no letter follows."""
    if not CLOSING.issuperset(text[start + 1 : end]):
        return False
    before, after = text[start - 1 : start], text[end : end + 1]
    if end - start > 2:
        return not after.isalpha()
    if text[start + 1] in "\u00a0—«»":  # these stand between words or alone: Ã\u00a0 is à, and Â« is «
        return before.isupper()
    return not before.islower() and not after.isalpha()


Messages = Sequence[Message]

# An answer that zlib compresses to less than this share may be a loop. Measured: prose and code 0.4 to 0.9, answers in
# Python's documentation at least 0.3, loops below 0.15.
LOOP_RATIO = 0.25
ZLIB_OVERHEAD_BYTES = 12
LOOP_MIN_CHARS = 100
LOOP_MIN_REPEATS = 6
MAX_REPEATED = 0.1  # share of the answers of a conversation that may repeat their question
OVERLAP_CHARS = 40  # minimum length of a question's end that the answer begins with
LOOP_MAX_PERIOD = 300
# A loop over half of a text covers the characters before or after its middle, and a copy of them one period away.
# With a longer probe the copy could lie outside of the loop.
LOOP_PROBE_CHARS = 32
LOOP_WINDOW = 8192  # characters on each side of the middle of a long text, searched before the whole text
_WORD = re.compile(r"\w+")
_NUMBER_NAMES = (
    "six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
)
_NUMBER_WORDS = {name: str(n) for n, name in enumerate(_NUMBER_NAMES.split(), LOOP_MIN_REPEATS)}
_LOST_WORDS = re.compile(r"(?:(?<!\S)\?+[.,;:!|-]*\s+){5,}\?+")
MAX_CHARS_WITHOUT_MODEL = 1_000_000  # about 250,000 tokens, the window of the longest usual models


def check_roles(messages: Messages) -> None:
    """Check that user and assistant alternate, that tool results follow a call, and that no system turn is last.

    A system turn inside the conversation is refused later, if the model's template has no place for it.
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
            lacks = (
                ", which has no tool_calls: write the call there" if (role, previous) == ("tool", "assistant") else ""
            )
            raise RowRefused("role-order", f"message {i + 1}: {role} after {previous}{lacks}")
        previous = role
    if not any(message.role == "assistant" for message in messages):
        raise RowRefused("no-answer")
    if previous != "assistant":
        raise RowRefused("role-order", f"the last message is the {previous}'s: nothing answers it")


def check_empty(messages: Messages) -> None:
    """Check that no question and no answer without calls is empty."""
    for message in messages:
        if message.content.strip():
            continue
        if message.role == "assistant" and not message.tool_calls:
            raise RowRefused("empty-answer")
        if message.role == "user":
            raise RowRefused("empty-question")


def check_characters(messages: Messages) -> None:
    """Check for NUL, lone surrogates, lost letters and wrongly decoded text."""
    for i, message in enumerate(messages):
        text = message.content if message.reasoning is None else f"{message.reasoning}\n{message.content}"
        # Words of question marks follow each other where the encoding of the text lacked their letters.
        lost = _LOST_WORDS.findall(text) if "?? ?" in text and message.role != "tool" else ()
        if any(len({len(word) for word in run.split()}) > 1 for run in lost):
            raise RowRefused(
                "replacement-character", "words of question marks stand where letters were: encode as UTF-8"
            )
        if "\0" in text:
            raise RowRefused("nul-byte")
        if text.isascii():
            continue
        if "\ufffd" in text and message.role != "tool":  # a tool may really have printed it
            raise RowRefused("replacement-character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ord(text[error.start])
            if 0xDC80 <= half <= 0xDCFF:  # a byte that was not UTF-8, as the CSV and JSON readers keep it
                raise not_utf8(half - 0xDC00, text[: error.start]) from None
            raise RowRefused("lone-surrogate") from None
        piece = mojibake(text) if message.role != "tool" else None
        if piece and not _is_quoted(text, messages[i:]):
            raise RowRefused("mojibake", f"{piece!r} was {repaired(piece)!r}: read the source as UTF-8")


def _is_quoted(text: str, messages: Messages) -> bool:
    """Return whether each wrongly decoded word of a text also occurs rightly decoded, in the text or its answer.

    Then the text is about wrong decoding: a text that was decoded wrongly has no right words.
    """
    answer = next((message.content for message in messages if message.role == "assistant"), "")
    right = set(_WORD.findall(f"{text}\n{answer}"))
    return all(set(_WORD.findall(fixed)) <= right for fixed in repaired_words(text))


def check_answers(messages: Messages) -> None:
    """Check that answers are not loops and that at most a few repeat their question."""
    question = ""
    repeated = answers = 0
    for message in messages:
        if message.role == "user":
            question = message.content
        elif message.role == "assistant":
            answer = message.content
            answers += 1
            if len(answer) == len(question) or abs(len(answer) - len(question)) < 16:  # cheaper than folding case
                repeated += bool(answer and answer.strip().casefold() == question.strip().casefold())
            if _continues(question, answer):
                raise RowRefused("answer-is-question", "the question's end comes again as the answer's beginning")
            if len(answer) >= LOOP_MIN_CHARS and has_loop(answer) and not _is_requested(question, answer):
                raise RowRefused("repeated-loop")
    if repeated > answers * MAX_REPEATED:
        raise RowRefused("answer-is-question")


def _continues(question: str, answer: str) -> bool:
    """Return whether question and answer are overlapping pieces of running text.

    The overlap begins in the middle of a line. A text to be completed begins after a line, colon, quote or sentence.
    """
    start = question.find(answer[:OVERLAP_CHARS]) if len(answer) > OVERLAP_CHARS else -1
    if start < 2 or question[start - 1] != " " or not (question[start - 2].isalnum() or question[start - 2] in ",;"):
        return False
    shared = question[start:]
    return "\n" not in shared and len(shared) < len(answer) and answer.startswith(shared)


def has_loop(text: str) -> bool:
    """Return whether one piece, repeated at least six times in a row, fills half of `text`."""
    if not _middle_comes_again(text):
        return False
    encoded = text.encode("utf-8", "surrogatepass")
    if len(zlib.compress(encoded, 1)) - ZLIB_OVERHEAD_BYTES > LOOP_RATIO * len(encoded):
        return False
    middle = len(text) // 2  # a loop over half of the text fills half of any window there
    if len(text) > 4 * LOOP_WINDOW and not has_loop(text[middle - LOOP_WINDOW : middle + LOOP_WINDOW]):
        return False
    for period in range(1, min(LOOP_MAX_PERIOD, len(text) // LOOP_MIN_REPEATS) + 1):
        if _longest_repeat(text, period) >= max(len(text) // 2, period * LOOP_MIN_REPEATS, LOOP_MIN_CHARS):
            return True
    return False


def _is_requested(question: str, answer: str) -> bool:
    """Return whether an answer is one piece repeated as often as a number in the question says."""
    words = _WORD.findall(question.lower())
    for number in {_NUMBER_WORDS.get(word, word) for word in words}:
        if not (number.isdecimal() and len(number) < 4 and int(number) >= LOOP_MIN_REPEATS):
            continue
        for text in (answer, answer.strip() + "\n", answer.strip() + " "):
            size, rest = divmod(len(text), int(number))
            piece = text[:size].strip()
            # A piece that is itself a repetition: 240 repetitions are not 20 repetitions of twelve.
            repeats = any((piece + gap + piece).find(piece, 1) <= len(piece) for gap in (" ", "\n"))
            if not rest and text == text[:size] * int(number) and not repeats:
                return True
    return False


def _middle_comes_again(text: str) -> bool:
    """Return whether a copy of the text beside the middle is within the longest period.

    This takes a twentieth of the time of compressing the text.
    """
    middle = len(text) // 2
    for start in (middle - LOOP_PROBE_CHARS, middle + 1):
        probe = text[start : start + LOOP_PROBE_CHARS]
        before = text.find(probe, max(0, start - LOOP_MAX_PERIOD), start + LOOP_PROBE_CHARS - 1)
        if before >= 0 or text.find(probe, start + 1, start + LOOP_MAX_PERIOD + LOOP_PROBE_CHARS) >= 0:
            return True
    return False


def _longest_repeat(text: str, period: int) -> int:
    """Return the length of the longest part of `text` that repeats with `period`."""
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
    """Check the length in characters, for preparations without a model."""
    num_chars = sum(len(message.content) for message in messages)
    if num_chars > MAX_CHARS_WITHOUT_MODEL:
        raise RowRefused("too-long-characters", f"{num_chars:,} characters, the limit is {MAX_CHARS_WITHOUT_MODEL:,}")


def check_message_weights(messages: Messages) -> None:
    """Check that an answer has a weight."""
    if not any(message.weight for message in messages if message.role == "assistant"):
        raise RowRefused("no-trained-token", "every answer has the weight 0")


def control_token_check(tokens: Sequence[str]) -> Callable[[Messages], None]:
    """Return a check that no text holds one of these control tokens."""
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
    check_roles,
    check_empty,
    check_characters,
    check_message_weights,
    check_answers,
)


def check_messages(messages: Messages, checks: Sequence[Callable[[Messages], None]] = CHECKS) -> None:
    """Run every check. Raise RowRefused with the first reason."""
    for check in checks:
        check(messages)
