"""The checks of a draft against its source: options, paths and units exist there, code parses, the answer is supported.

Each check returns the reason for which a draft is rejected, or None. Reasons are the keys of the report.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hivetune.checkers.words import python_parses, shell_parses
from hivetune.synth.make.draft import Draft
from hivetune.synth.sources.page import DocPage, options_in, words_in
from hivetune.synth.words import word_list

MIN_QUESTION_CHARS, MAX_QUESTION_CHARS = 6, 700
MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 2, 1600
# Share of an answer's words that must stand in the source or in the question; the rest is the answer's own frame
# ("Run this:"). For text of a model, which has no frame of ours.
SUPPORTED_SHARE = 0.85
# Share of function words in prose: 0.25 to 0.5 in manuals, 0.1 in terse ones, near 0 in other languages.
MIN_ENGLISH = 0.05
PROSE_WORDS = 30  # in a shorter text the share says nothing
_PATH = re.compile(r"(?<![\w.<~/-])(?:~|\$\w+)?/(?:[\w.+@-]+/)*[\w.+@-]+")
_UNIT = re.compile(r"\b[\w@.-]+\.(?:service|socket|target|timer|mount|path|slice|scope|swap|automount|device)\b")
_NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w-])")
_LIST_NUMBER = re.compile(r"^\d+\. ", re.MULTILINE)
_FENCES = re.compile(r"```\w*")

DRAFT_REASONS: Mapping[str, str] = {
    "too-short": "the question or an answer is too short to teach anything",
    "too-long": "the question or an answer is longer than a row should be",
    "other-language": "the text is not English",
    "unknown-option": "an option is named that the source does not have",
    "unknown-path": "a path is named that the source does not have",
    "unknown-unit": "a unit is named that the source does not have",
    "invented-exists": "the option that should not exist is in the source",
    "does-not-parse": "a command or code does not parse",
    "unsupported": "the answer has words, numbers or names that the source does not have",
    "duplicate": "equal to a row that is kept already, or to one that it is compared with",
    "near-duplicate": "nearly equal to a row that is kept already, or to one that it is compared with",
    "frozen-question": "it asks a frozen question, which no row may teach",
    "no-source": "the page that it cites is not on this machine",
    "control-character": "the text has characters that a terminal obeys",
    "not-a-pair": "the model's answer is not a question with an answer",
    "refused": "the model refused, or said that the passage has nothing to ask about",
}


@dataclass(frozen=True)
class Cited:
    """The names that a draft may use: all names on its page. Made once for all drafts of a page."""

    page: DocPage

    @property
    def about(self) -> str:
        return f"{self.page.label} {self.page.command or ''}"

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words_in(f"{self.page.text} {self.about}"))

    @cached_property
    def numbers(self) -> frozenset[str]:
        return frozenset(_NUMBER.findall(f"{self.page.text} {self.about}"))


def check_draft(draft: Draft, source: Cited, parses: Callable[[str, str], bool], *, strict: bool) -> str | None:
    """Return the first reason against a draft, or None.

    `strict`: the text is a model's.
    """
    questions, answers = [q for q, _ in draft.turns], [a for _, a in draft.turns]
    reason = (
        _length(questions, answers)
        or _language(draft)
        or _options(draft, source, answers)
        or _named(source, draft, answers)
        or _supported(draft, source, strict=strict)
    )
    if reason is not None:
        return reason
    parsed = all(parses(c, "sh") for c in draft.commands) and all(parses(c, "python") for c in draft.python)
    return None if parsed else "does-not-parse"


def _length(questions: Iterable[str], answers: Iterable[str]) -> str | None:
    for texts, least, most in (
        (questions, MIN_QUESTION_CHARS, MAX_QUESTION_CHARS),
        (answers, MIN_ANSWER_CHARS, MAX_ANSWER_CHARS),
    ):
        for text in texts:
            if len(text.strip()) < least:
                return "too-short"
            if len(text) > most:
                return "too-long"
            if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text):
                return "control-character"
    return None


def _language(draft: Draft) -> str | None:
    """Check for English prose: few letters of other scripts, and as many function words as prose has."""
    text = " ".join([*(part for turn in draft.turns for part in turn), draft.passage[:2000]])
    letters = sum(character.isalpha() for character in text)
    ascii_letters = sum(character.isascii() and character.isalpha() for character in text)
    found_words = re.findall(r"[a-z]+", text.lower())
    if letters and ascii_letters < 0.95 * letters:
        return "other-language"
    if len(found_words) >= PROSE_WORDS and sum(
        word in word_list("english") for word in found_words
    ) < MIN_ENGLISH * len(found_words):
        return "other-language"
    return None


def _options(draft: Draft, source: Cited, answers: list[str]) -> str | None:
    """Check that each option of an answer is in the source, and of a question unless it is meant to be missing."""
    documented = source.page.options
    if any(option in documented for option in draft.absent):
        return "invented-exists"
    absent = set(draft.absent)
    in_questions = {option for question, _ in draft.turns for option in options_in(question)} - absent
    named = {option for answer in answers for option in options_in(answer)}
    return "unknown-option" if (in_questions | named) - documented else None


def _named(source: Cited, draft: Draft, answers: list[str]) -> str | None:
    """Check that paths and units of the answers are in the source or in a question."""
    questions = "\n".join(question for question, _ in draft.turns)
    for answer in answers:
        paths = [path.rstrip(".-") for path in _PATH.findall(answer)]
        for names, reason in ((paths, "unknown-path"), (_UNIT.findall(answer), "unknown-unit")):
            if any(name not in source.page.text and name not in questions for name in names):
                return reason
    return None


def _supported(draft: Draft, source: Cited, *, strict: bool) -> str | None:
    """Check that numbers of an answer stand in the source or the questions, and its words too, apart from a frame.

    `strict`: they stand in the passage, not only on the page, and so do all names, since a model may bring what it
    knows.
    """
    questions = "\n".join(question for question, _ in draft.turns)
    source_text = f"{draft.passage}\n{questions}\n{source.about}"
    numbers = set(_NUMBER.findall(source_text)) | {"1", "2", "3"}
    terms = set(words_in(source_text)) | word_list("english") | word_list("frame")
    if not strict:
        numbers |= source.numbers
        terms |= source.words
        terms |= {part for code in draft.commands for part in words_in(code)}  # operands of the synopsis in capitals
    for _, answer in draft.turns:
        plain = _LIST_NUMBER.sub("", _FENCES.sub(" ", answer))
        if any(number not in numbers for number in _NUMBER.findall(plain)):
            return "unsupported"
        answer_words = words_in(plain)
        if sum(word in terms for word in answer_words) < SUPPORTED_SHARE * len(answer_words):
            return "unsupported"
        for word in answer_words if strict else ():  # a name is written in code, in capitals, or with a digit
            is_name = any(map(str.isdigit, word)) or f"`{word}`" in plain or word.upper() in plain.split()
            if is_name and word not in terms:
                return "unsupported"
    return None


# Nothing is run, and equal code is parsed once.

_CACHED = 4096
# Words without any character that means something to the shell. Starting bash takes 10 ms, and most lines are so.
_PLAIN_LINE = re.compile(r"[A-Za-z_./][\w./-]*(?: [\w./:=@%+,-]+)*")
_RESERVED = frozenset({"if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac",
                       "select", "function", "time", "coproc", "in"})  # fmt: skip


@lru_cache(_CACHED)
def parses(code: str, language: str) -> bool:
    """Return whether code parses: shell by bash's grammar, Python by its own; nothing is run.

    `language`: sh or python. Raises MachineNotFit without bash.
    """
    if language == "sh" and all(is_plain_command(line) for line in code.splitlines()):
        return bool(code.strip())
    fenced = f"```{'bash' if language == 'sh' else language}\n{code}\n```"
    return shell_parses(fenced, {}) if language == "sh" else python_parses(fenced, {})


def is_plain_command(line: str) -> bool:
    """Return whether a line is a simple command by bash's grammar: no quote, no operator, no reserved word in front."""
    return _PLAIN_LINE.fullmatch(line) is not None and line.split(" ", 1)[0] not in _RESERVED
