"""Every reason why a row is left out or changed: its severity, its meaning and what to do about it.

This is the only list of them; a test checks that docs/data-checks.md is equal to it.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["reject", "set_aside", "warn"]


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason. `reject`: the row is broken. `set_aside`: intact, but left out by a setting. `warn`: used, but
    changed."""

    severity: Severity
    meaning: str
    hint: str


class RowRefused(Exception):
    """One row can't be used. `reason` is a key of REASONS; `hint` says what to do with this very row."""

    def __init__(self, reason: str, hint: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.hint = hint or REASONS[reason].hint


def not_utf8(byte: int, before: str) -> RowRefused:
    """Return the refusal of a row with a byte that is not UTF-8; its hint names the most likely encoding."""
    name = "Windows-1252" if 0x80 <= byte <= 0x9F else "Latin-1 or Windows-1252"
    context = " ".join(before.split())[-20:]
    remedy = "convert it: iconv -f WINDOWS-1252 -t UTF-8"
    return RowRefused("bad-characters", f"byte 0x{byte:02X} after {context!r}: the text may be {name}; {remedy}")


def not_encodable(error: UnicodeEncodeError) -> RowRefused:
    """Return the refusal of a row whose text UTF-8 can't encode."""
    half = ord(error.object[error.start])
    if 0xDC80 <= half <= 0xDCFF:  # the readers of CSV and JSON keep a byte that was no UTF-8 as half a character
        return not_utf8(half - 0xDC00, error.object[: error.start])
    hint = "half a character (a lone surrogate), mostly of an emoji: cut the text between characters"
    return RowRefused("bad-characters", hint)


# (meaning, hint) of each reason. The row is broken:
_REJECT = {
    # The bytes and the JSON
    "bad-characters": (
        "the text is not UTF-8, or has a NUL, half a character (a lone surrogate) or U+FFFD: a part of it was lost",
        "save or decode the source again as UTF-8, or delete the row",
    ),
    "bad-json": ("the row is not a complete JSON object, or is nested too deeply", "correct the JSON of this row"),
    "broken-file": (
        "the rest of the file is unreadable: damaged compression, CSV, JSON array or Parquet",
        "restore the file",
    ),
    "csv-columns": (
        "the row has more or fewer fields than the header",
        "quote fields that contain commas or line breaks",
    ),
    # The shape of the row
    "unread-column": (
        "a column is not read that may belong to the question",
        "map it, for example --columns prompt=question+country, or leave it out: --ignore country",
    ),
    "unknown-layout": (
        "the columns are unknown, or are those of one message of a conversation or one line of a session",
        "map your columns, for example --columns prompt=my_question,completion=my_answer",
    ),
    "rendered-text": (
        "the text is a conversation with a template's marks: its questions would be learned too",
        "give the turns as a list `messages`; to learn the whole text: --columns text=text",
    ),
    "wrong-type": ("a field has the wrong type", "a text is a string, a weight 0 or 1"),
    "who-answers": (
        "several people speak, and none is named as the assistant",
        "name who answers: --columns assistant=NAME",
    ),
    "role-order": (
        "a role is unknown or out of order",
        "system first, then user and assistant in turn; a tool answer only after a tool call",
    ),
    "empty-turn": ("the question or the answer is missing or has no text", "fill it in or delete the row"),
    "unsupported-content": ("the content is not text: image, audio, file", "keep the text parts only"),
    "bad-tool-call": (
        "a tool call lacks its name or its input, or its arguments are not a JSON object",
        "complete the call in the log",
    ),
    "unread-outcome": (
        "the column that success is mapped to is neither yes nor no",
        "map a column of true and false, yes and no, or 1 and 0",
    ),
    "preference-row": (
        "chosen/rejected pairs are for preference training",
        "set learn.use: [sft, pairs], or map completion to the chosen column",
    ),
    "pair-differs": (
        "the better and the worse answer are the same, not one turn each, or differ in their question",
        "make the turns before both answers equal, and the answers different",
    ),
    # The text
    "control-token": (
        "the text contains a control token of the model, which would end or fake a turn, or its padding token",
        "delete the token from the text",
    ),
    "private": (
        "the row contains a secret or personal data, and data.on_private is reject",
        "remove it, or set data.on_private: redact",
    ),
    # The template, the tokens and the mask (need a model)
    "template-error": (
        "the model's chat template can't render the row",
        "see the message; often the order of the roles",
    ),
    "not-in-template": ("the template drops or rewrites a part of the row", "use a model whose template keeps it"),
    "no-trained-token": ("no token of the row would be trained", "give one answer the weight 1"),
    "end-not-trained": (
        "the answer has no end token: the model would never learn to stop",
        "use the model's own template",
    ),
    "too-long": (
        "the row has more tokens than max_length, more than a million characters, or more than 16 MiB",
        "raise max_length, or divide long conversations: --set data.on_overlong=split",
    ),
    "too-costly": (
        "checking the row takes more than 20 s of processor time, or its chat template more than 2 s or 1 GiB",
        "split the row, or look at its content; use the template that belongs to the model",
    ),
}
# The row is intact, but left out by a setting:
_SET_ASIDE = {
    # By policy
    "filtered": (
        "the row does not match `where` in data.columns, the named assistant answers nobody in it, or it is not of the"
        " agent or category that is trained (cycle.by)",
        "nothing to do",
    ),
    "failed": (
        "the row's success is false, or its feedback is negative",
        "set learn.use: [sft, failures] to learn from it as a bad answer",
    ),
    "not-learned": (
        "the setting learn does not name this kind of row, or it is a bad answer whose group is held out",
        "see learn in the config",
    ),
    "for-lessons": (
        "a bad answer that no lesson reached: there are fewer than 50, or no validation rows",
        "collect more of them, or correct it (POST /v1/feedback)",
    ),
    "contradictory": (
        "the same answer is called good in one row and bad in another",
        "decide which is right and delete the other",
    ),
    "cut-off-answer": (
        "the answer was cut at a length limit: its end would be learned as one",
        "raise the limit where the answers are made",
    ),
    "earlier-turns-missing": (
        "the record lacks the earlier turns of its conversation",
        "log the whole conversation: its earlier turns are with the provider, or encrypted",
    ),
    "not-held": (
        "a log lacks an image, a file, a tool or an answer that the row needs, or a part of it is broken",
        "nothing to do; the rest of the log is read",
    ),
    "own-answer": (
        "a release gave the answer, and nobody approved it, or it would judge a release",
        "rate it (POST /v1/feedback), or set data.also_train: [own_answers]",
    ),
    "untrusted": ("the text to learn came from a tool or a web page", "to train it, set data.also_train: [untrusted]"),
    "forgotten": ("its user, session, source or row was forgotten", "nothing to do; hivetune forget excludes it"),
    "frozen-question": ("the row asks a frozen question, which judges releases and is never trained", "nothing to do"),
    "not-drawn": (
        "data.balance, data.max_rows or the hours of a cycle allow fewer rows, and others were drawn",
        "set data.balance: none, or raise data.max_rows",
    ),
    "quota": (
        "synthetic rows would be more than half of all, its client would teach more than a third of all, or its user"
        " has more than 100 bad answers",
        "nothing to do; the rows that are used are drawn by content",
    ),
    "set-aside": ("a person set it aside", "undo it on the dashboard's page Review"),
}
# The row is used, but changed; always counted:
_WARN = {
    "rewritten": ("parts of the row were joined, removed or written in another form", "nothing to do"),
    "mojibake": (
        "a text has signs such as Ã© for é: UTF-8 was read as Windows-1252",
        "read the source again as UTF-8, or repair it with ftfy",
    ),
    "worse-left-out": (
        "the worse answer is unusable, or differs in less than a tenth of its words: only the better is learned",
        "see the reason behind it",
    ),
    "redacted-secret": ("a secret was replaced by [SECRET]", "revoke it: it was in a log"),
    "redacted-personal": ("personal data was replaced by a placeholder", "to keep it, set data.on_private: keep"),
    "shortened": (
        "longer than max_length: divided before questions, or cut there (data.on_overlong)",
        "raise max_length to keep it whole",
    ),
    "empty-thought": (
        "the template writes a thought before the answer, and the row has none: it is empty",
        "add reasoning to the row, or use a model that does not think",
    ),
}
_BY_SEVERITY: dict[Severity, dict[str, tuple[str, str]]] = {"reject": _REJECT, "set_aside": _SET_ASIDE, "warn": _WARN}
REASONS = {
    name: Reason(severity, *texts) for severity, reasons in _BY_SEVERITY.items() for name, texts in reasons.items()
}
# What reading and rendering did to a row, by their words. It all counts as "rewritten": nobody has to do anything.
REWRITTEN = {
    "call-without-result": "the log lacks the result of a tool call, which was left empty",
    "ends-before-media": "the conversation ends before an image, a file or a tool that its log lacks",
    "json-answer": "an answer that is an object was written as JSON text",
    "leading-answer": "turns before the first question were removed",
    "lone-thought": "thoughts without an answer were removed",
    "merged-turns": "consecutive turns of one role were joined with an empty line",
    "other-answers": "the question has several answers: the first is learned",
    "other-branches": "abandoned retries and edits were removed",
    "program-notes": "notes, errors and commands of a program, and internal notes, were removed",
    "result-without-call": "results of tool calls that the log lacks were removed",
    "source-marks": "marks of sources that the log lacks were removed",
    "stray-characters": "a byte order mark (U+FEFF) was removed, or NUL in a tool's result replaced by U+FFFD",
    "tool-call-ids": "ids of tool calls were missing or in another form than the template's: they were made",
    "trailing-turns": "turns after the last answer were removed",
    "turn-by-turn": "the template rewrites earlier turns: each answer is trained with the prompt of a server",
    "turns-from-text": "speakers or template marks in a text were read as turns, or removed from its ends",
}
# The reasons of the rows that a cycle leaves out, each with its hint.
LEAVE_OUT = {
    "own-answer": "a release gave the answer, so it can't judge a release: correct it",
    "filtered": "it is of another agent or category (cycle.by)",
    "not-drawn": "the training budget is too small for this row; later cycles may draw it, or raise cycle.hours",
}
