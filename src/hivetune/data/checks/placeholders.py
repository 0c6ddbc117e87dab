"""The search for placeholders: answers such as `TBD`, `#REF!`, `n/a`, `[deleted]` or an API's error message.

Only a whole answer is a placeholder. It is a real answer if the prompt names it ("reply N/A if ..."), or if it may be
the name of a class and many rows of the file share few answers.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from hivetune.data.pieces.said import names, parsed
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

_DOCUMENT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _compiled(text: str | Sequence[str]) -> re.Pattern[str]:
    """Compile a pattern of placeholders.toml with its fragments."""
    pattern = "".join(text)
    for name, fragment in _DOCUMENT["fragments"].items():
        pattern = pattern.replace(f"<{name}>", fragment)
    return re.compile(pattern)


_PATTERNS = {name: _compiled(text) for name, text in _DOCUMENT["patterns"].items()}
_LABELS, _WORDS = frozenset(_DOCUMENT["words"]["labels"]), frozenset(_DOCUMENT["words"]["others"])
_SHOWN_CHARS = 40
MAX_CHARS = 400  # longer answers are no placeholders, except for those that begin so
_LONG_STARTS = ("lorem ipsum", "<!doctype html", "event:", "data:")  # the last two: raw events of a stream
_MAX_OPEN_CHARS = 200  # a longer question may quote a template
_MIN_LABELLED_LINES = 3
_BRACKETS = "[]<>(){}*#%$ .!\u2026"
_MAX_RETRY_CHARS = 200
_SIGNS = "❌❗‼⚠🚫⛔✖✗\ufe0f "  # before a message of a program
_ERROR_KEYS = names("error message code status status_code type param detail details request_id success ok statuscode")
_MIN_LABELLED = 10  # fewer rows are no evidence
_ROWS_PER_LABEL = 3  # minimum, on average
_SHORT_SHARE = 0.9
_LABEL_CHARS, _LABEL_WORDS = 40, 4


def refuse_placeholder(messages: Sequence[Message], few_labels: Callable[[], bool]) -> tuple[str, ...]:
    """Return the warnings of a row, or raise RowRefused("placeholder-answer").

    `few_labels` returns whether many rows of the file share few answers; it is called only when that matters.
    """
    warnings: tuple[str, ...] = ()
    for number, message in enumerate(messages):
        if message.role != "assistant" or not message.weight or message.tool_calls:
            continue
        if (slot := _never_filled_in(message.content, messages[:number])) is not None:
            raise RowRefused("placeholder-answer", f"{slot} was never filled in")
        may_be_label = placeholder_in(message.content, [m.content for m in messages[:number] if m.role != "tool"])
        if may_be_label is None:
            continue
        if not (may_be_label and few_labels()):
            where = f" of message {number + 1}" if number + 1 < len(messages) else ""
            hint = f"{message.content.strip()[:_SHOWN_CHARS]!r} stands in the place of the answer{where}"
            raise RowRefused("placeholder-answer", hint)
        warnings = ("label-answer",)
    return warnings


def _never_filled_in(answer: str, before: Sequence[Message]) -> str | None:
    """Return the part of a template that is left in an answer or its question, or None."""
    if "{{" in answer and not any(sign in answer for sign in ("{%", "```", "<")):  # no code
        about_templates = any(_PATTERNS["of_templates"].search(message.content) for message in before)
        if _PATTERNS["unnamed_speaker"].search(answer) and not about_templates:
            return "{{name}} or {{author}} in the answer"
    prompt = before[-1].content if before and before[-1].role == "user" else ""
    may_be_open = "[" in prompt and len(prompt) <= _MAX_OPEN_CHARS
    if may_be_open and (slot := _PATTERNS["open_place"].search(prompt)) and not _PATTERNS["of_brackets"].search(prompt):
        return f"{slot.group(1)} in the question"
    return "most of the form in the answer" if _is_empty_form(answer, before) else None


def _is_empty_form(answer: str, before: Sequence[Message]) -> bool:
    """Return whether an answer is lines with labels, most without a value, and the prompt names none of the labels."""
    if len(answer) > MAX_CHARS or not (":\n" in answer or ": \n" in answer):
        return False
    lines = [_PATTERNS["labelled"].fullmatch(line.rstrip()) for line in answer.splitlines() if line.strip()]
    labelled = [line for line in lines if line is not None]
    empty = [line.group(1) for line in labelled if not line.group(2).strip()]
    if len(labelled) < max(len(lines), _MIN_LABELLED_LINES) or 2 * len(empty) <= len(labelled):
        return False
    return not any(_is_named(label, [message.content for message in before]) for label in empty)


def placeholder_in(answer: str, before: Iterable[str]) -> bool | None:
    """Return None for an answer; for a placeholder, return whether it could be the name of a class. `before` has the
    texts of the prompt.
    """
    text = answer.strip()
    if _is_shown_instead(text, before):
        return False
    if len(text) > MAX_CHARS and not text[:40].lower().startswith(_LONG_STARTS):
        return None
    plain = " ".join(text.casefold().split())
    plain = plain.lstrip(_SIGNS) or plain
    bare = plain.rstrip(".!") or plain
    if plain in _LABELS or bare in _LABELS:
        return None if _is_named(bare, before) else True
    if (may_be_label := _left_to_fill(plain, before)) is not None:
        return may_be_label
    if _is_missing(text, plain):
        return None if _is_named(bare.split(" dolor")[0], before) else False
    if _PATTERNS["no_model"].fullmatch(plain):
        return None if any(_PATTERNS["model"].search(p) for p in list(before)[-1:]) else False
    return False if _is_error(text, plain, before) else None


def _is_shown_instead(text: str, before: Iterable[str]) -> bool:
    """Return whether a chat showed a text instead of an answer: a picture, or that something went wrong."""
    if text.startswith(("http", "![")) and _PATTERNS["picture"].fullmatch(text):
        return not any(map(_PATTERNS["about_links"].search, before))
    tries = len(text) <= _MAX_RETRY_CHARS and _PATTERNS["try_again"].fullmatch(" ".join(text.casefold().split()))
    return bool(tries) and not any("try again" in prompt.casefold() for prompt in before)


def _left_to_fill(plain: str, before: Iterable[str]) -> bool | None:
    """Return None for an answer; for a text to be replaced later, return whether it may be the name of a class."""
    text = plain.strip(_BRACKETS).replace("_", " ")
    is_name = _PATTERNS["named"].fullmatch(text) is not None
    if not is_name and not _PATTERNS["unfilled"].fullmatch(text):
        return None
    word = None if is_name else _PATTERNS["tells_unfilled"].search(text)
    return None if _is_named(word.group() if word else text, before) else is_name


def _is_missing(text: str, plain: str) -> bool:
    """Return whether an answer says that there is none, or is to be filled in."""
    return bool(
        {plain, plain.rstrip(".!")} & _WORDS
        or plain.startswith("lorem ipsum")
        or _PATTERNS["not_made"].fullmatch(plain.rstrip(".!。 "))
        or _PATTERNS["mark"].fullmatch(plain)
        or _PATTERNS["stream"].match(text)
        or _PATTERNS["sheet"].fullmatch(text)
        or _PATTERNS["slot"].fullmatch(plain)
    )


def _is_named(word: str, before: Iterable[str]) -> bool:
    """Return whether the prompt names the answer. Signs must be in quotes, since most questions have some."""
    is_word = any(c.isalnum() for c in word)
    pattern = re.compile(
        rf"(?<!\w){re.escape(word)}(?!\w)" if is_word else rf"[\"'`“]{re.escape(word)}[\"'`”]",
        re.I,
    )
    return any(pattern.search(text) for text in before)


def _is_error(text: str, plain: str, before: Iterable[str]) -> bool:
    """Return whether an answer is the error message of an API, and the prompt is not about errors."""
    is_error = bool(
        _PATTERNS["error_text"].fullmatch(plain)
        or _PATTERNS["error_status"].fullmatch(plain)
        or _PATTERNS["error_start"].match(plain)
    )
    value = None if is_error else parsed(text)
    if isinstance(value, dict) and value.get("error"):
        is_error = {str(key).lower() for key in value} <= _ERROR_KEYS
    # The prompt last: searching it takes five times as long as everything else here.
    return is_error and not any(_PATTERNS["about_errors"].search(prompt) for prompt in before)


def share_few_labels(answers: Collection[str]) -> bool:
    """Return whether the answers of a file are classes: short, and each of many rows. Placeholders don't count."""
    texts = [answer.strip().casefold() for answer in answers if placeholder_in(answer, ()) is None]
    short = [text for text in texts if len(text) <= _LABEL_CHARS and len(text.split()) <= _LABEL_WORDS]
    if len(texts) < _MIN_LABELLED or len(short) < _SHORT_SHARE * len(texts):
        return False
    return len(Counter(short)) > 1 and len(Counter(short)) * _ROWS_PER_LABEL <= len(short)
