"""The rule, the search for all rules in one text, and what a value must look like to count.

No rule fires on a high-entropy word alone, because such a rule fires in every other line of prose. A secret has a known
prefix (AKIA, ghp_) or follows a name such as `password=`; a number is personal by its shape and checksum. Every
repetition in a pattern has an upper bound (tests/data/checks/test_redact_linear.py), so the work at each place is
bounded: an unbounded rule once took 58 s for a prompt of 4.8 kB.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

Gate = Literal["text", "digits", "long-word"]
Check = Callable[[str, int, int], bool]  # (text, start, end) -> whether it is a find
LONG_WORD = re.compile(r"\S{15,20000}+")  # no token is shorter
DIGITS = re.compile(r"\d\D{0,2}\d")


@dataclass(frozen=True)
class Rule:
    """One kind of find. A text must hold one of the `markers`, if there are any.

    The gates: "digits" wants two digits, with "long-word" the marker must stand in a word of 15 characters. The pattern
    is tried where a marker begins, or anywhere without markers; `behind`: after a marker. `group` is the part to
    replace. With `folded`, markers and pattern read the text in lower case. `holds` checks what would be replaced, and
    `needs` is a cheap sign that the text may hold any.
    """

    name: str
    title: str
    placeholder: str
    regex: str
    markers: tuple[str, ...] = ()
    gate: Gate = "text"
    behind: bool = False
    group: int = 0
    folded: bool = False
    flags: re.RegexFlag = re.ASCII
    holds: Check | None = None
    needs: re.Pattern[str] | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The compiled `regex`: few rules are tried in a text, and to compile all takes 0.1 s, a third of a start."""
        return re.compile(self.regex, self.flags)

    def matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each part that may be replaced."""
        if not self.markers:
            yield from (match.span(self.group) for match in self.pattern.finditer(text))
        for marker in self.markers:
            end = 0
            while (start := text.find(marker, end)) >= 0:
                end = start + len(marker)
                if match := self.pattern.match(text, end if self.behind else start):
                    yield match.span(self.group)


@dataclass(frozen=True, slots=True)
class Find:
    """A place in a text and the rule that matched there."""

    start: int
    end: int
    rule: Rule


class RuleSet:
    """A set of rules. Where two match, the earlier rule wins."""

    def __init__(self, rules: Sequence[Rule]):
        self.rules = tuple(rules)

    def find(self, text: str) -> list[Find]:
        """Return the finds in order, without overlaps."""
        finds: list[Find] = []
        lower = fold(text)
        digits = text if DIGITS.search(text) else ""
        gated = {"text": text, "folded": lower, "digits": digits, "long-word": " ".join(LONG_WORD.findall(text))}
        for rule in self.rules:
            looked_at, markers = gated["folded" if rule.folded else rule.gate], rule.markers
            if not looked_at or (markers and not any([marker in looked_at for marker in markers])):
                continue
            if rule.needs is not None and rule.needs.search(text) is None:
                continue
            for start, end in rule.matches(lower if rule.folded else text):
                if start == end or (rule.holds is not None and not rule.holds(text, start, end)):
                    continue
                index = bisect_left(finds, start, key=lambda find: find.start)
                overlaps = (index and finds[index - 1].end > start) or (index < len(finds) and finds[index].start < end)
                if not overlaps:
                    finds.insert(index, Find(start, end, rule))
        return finds


def word_list(text: str) -> tuple[str, ...]:
    """Return the words of `text`."""
    return tuple(text.split())


def fold(text: str) -> str:
    """Return `text` in lower case with the same length: characters that would grow (U+0130) stay as they are."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(low if len(low := c.lower()) == 1 else c for c in text)


def replace_finds(text: str, finds: Sequence[Find]) -> str:
    """Return `text` with the placeholder of each find; `finds` are in order."""
    pieces, position = [], 0
    for find in finds:
        pieces += [text[position : find.start], find.rule.placeholder]
        position = find.end
    return "".join([*pieces, text[position:]]) if pieces else text


# What stands for a value: a variable, code or a path, made of words and at most two digits at its end.
STANDS_IN = re.compile(
    r"(?:[$%@&(~/*]|(?:none|null|true|false|undefined|os|env|process|self|config|settings|secrets|vault|get|fetch|read|"
    r"fake|dummy|sample|test)(?![a-z]{0,3}\d))[$({]{0,2}[A-Za-z_./:%-]{0,80}\d{0,2}[()})%s]{0,3}",
    re.IGNORECASE,
)
PLACEHOLDER_STARTS = word_list("your my_ my- my. example xxx *** ... ••• changeme change_me change-me < { [ #{ ./")
PLACEHOLDER_PARTS = word_list(
    "example placeholder redacted changeme your_ your- xxxx **** .... _here -here ${ {{ }} $( ]( "
    "not-a-real insert_ replace_ [secret: 0000000000 ==="
)
# Words that stand behind "password:" in forms, schemas, messages and settings.
PLACEHOLDER_WORDS = frozenset(
    word_list(
        "password passwd pass passwort pwd secret token string text str user username user:pass pass123 "
        "required optional sha1 sha256 sha512 sha-256 md5 base64 utf8 utf-8 bcrypt argon2 argon2id scrypt "
        "pbkdf2 oauth2 basic http2 ldap3 field1 step1 step2 value1 admin root guest postgres localhost"
    )
)
# Measured on identifiers of the standard library: 99 % lie below 3.2 bits. 20 random characters of base 62 have 3.9.
ENTROPY_BITS = 3.3
CODE_SIGNS = re.compile(r"[(){}<>\[\];\\]|\w\.\w{3,20}\.\w")
_IDENTIFIER = re.compile(
    r"(?:\d{0,4}[A-Z]{0,2}[a-z]{3,20}[\d_.-]{0,4}){2,12}(?:[A-Z]?[a-z]{0,2}\d?)|[A-Z]{2,20}(?:_[A-Z\d]{1,20}){1,8}"
)
MAX_LOOKED_AT = 200  # characters of a value whose entropy is counted


def entropy_bits(text: str) -> float:
    """Return the Shannon entropy in bits per character."""
    counts = [text.count(c) for c in set(text)]
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def has_digit_and_letter(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isascii() and c.isalpha() for c in value)


def is_placeholder(value: str) -> bool:
    """Return whether a text stands for a value: your_key_here, ${TOKEN}, xxxx, or code that reads one."""
    lower = value.lower()
    if lower.startswith(PLACEHOLDER_STARTS) or lower.strip(".,!?:") in PLACEHOLDER_WORDS or STANDS_IN.fullmatch(value):
        return True
    is_path = value[0] in "/~." and value.count("/") > 1
    return is_path or any(part in lower for part in PLACEHOLDER_PARTS) or len(set(lower)) <= 3


def has_code_signs(value: str) -> bool:
    """Return whether a value looks like code: brackets or attribute access. A password may begin with "("."""
    return CODE_SIGNS.search(value.removeprefix("(") if ")" not in value else value) is not None


def looks_random(value: str) -> bool:
    """Return whether a value seems generated: letters and digits of high entropy, no identifier or placeholder."""
    if not has_digit_and_letter(value) or is_placeholder(value) or has_code_signs(value):
        return False
    return _IDENTIFIER.fullmatch(value) is None and entropy_bits(value[:MAX_LOOKED_AT]) >= ENTROPY_BITS


def looks_chosen(value: str) -> bool:
    """Return whether a person may have chosen a value as password: letters and digits, six digits, or signs."""
    if is_placeholder(value) or has_code_signs(value):
        return False
    digits, letters = sum(c.isdigit() for c in value), sum(c.isalpha() for c in value)
    signs = len(value) - digits - letters
    if letters == 0:
        return digits >= 6 and signs <= 2
    if digits == signs == 0:
        return sum(a.islower() and b.isupper() for a, b in pairwise(value)) >= 3
    return digits > 0 or (signs > 0 and any(c in "!@#$%^&*+=?" for c in value) and any(c.isupper() for c in value))
