"""The rule and the search for all rules in one text, in linear time.

No rule fires on a high-entropy word alone, because such a rule fires in every other line of prose. A secret has a known
prefix (AKIA, ghp_) or follows a word such as `password=`. A number is personal when its checksum and shape are right,
or after a word that names it.

A rule costs nothing in a text without its markers or that its gate excludes, and most words of a file come again and
again. So what a word may matter to is remembered. A pattern that begins at a marker is tried only there. Every
repetition in a pattern has an upper bound (tests/data/checks/test_redact_linear.py), so the work at each place is
bounded: an unbounded rule once took 58 s for a prompt of 4.8 kB.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal, NamedTuple

Gate = Literal["none", "digits", "number", "address", "coded-word", "long-word", "mixed-word"]
Tried = Literal["anywhere", "at-marker", "behind-marker", "behind-word"]
Check = Callable[[str, int, int], bool]  # (text as it came, start, end) -> whether it is a find

# The signs that open a gate.
NUMBER = re.compile(r"\d(?:[\d .()/-]{4,20}\d|\d[A-Za-z]\d\d[A-Za-z]\d)")
ADDRESS = re.compile(
    r"[:.-](?:\d{1,3}\.\d|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]|[0-9A-Fa-f]{2}-[0-9A-Fa-f]|[0-9A-Fa-f]{4}\.[0-9A-Fa-f])"
)
CODED = re.compile(r"\d")
CODED_WORD_CHARS, LONG_WORD_CHARS = 12, 20
SHORT_WORD = 5  # letters; a word up to here must not be the beginning of another one ("sin" of "since")
MAX_WORDS = 10_000  # that are remembered; 1 MB
MAX_WORD_CHARS = 60  # longer words hardly come again
ALL_ZEROS = str.maketrans("123456789", "0" * 9)


@dataclass(frozen=True)
class Rule:
    """One kind of find. A text must pass the `gate` and hold one of the `markers`, if there are any.

    The gates: "digits" wants a digit, "number" a longer number, "address" the signs of an IP or MAC address,
    "coded-word" a word of 12 characters with a digit, "mixed-word" one of 20 that has letters of both cases, too. With
    "long-word", the marker must stand in a word of 20 characters.

    `tried` says where the pattern is tried: anywhere, where a marker begins, after a marker, or after a marker that
    is a word of its own. `group` is the part to replace. With `folded`, markers and pattern read the text in lower
    case. `holds` checks what would be replaced, such as its checksum. `flags` are those of `regex`.
    """

    name: str
    title: str
    placeholder: str
    regex: str
    markers: tuple[str, ...] = ()
    gate: Gate = "none"
    tried: Tried = "anywhere"
    group: int = 0
    folded: bool = False
    flags: re.RegexFlag = re.NOFLAG
    holds: Check | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The compiled `regex`: few rules are tried in a text, and to compile all takes 0.2 s, a third of a start."""
        return re.compile(self.regex, self.flags)


@dataclass(frozen=True, slots=True)
class Find:
    """A place in a text and the rule that matched there."""

    start: int
    end: int
    rule: Rule


Traits = frozenset[int | str]  # of a word: the numbers of the rules with a marker in it, and the gates that it opens


class _Marker(NamedTuple):
    """A text that a word must contain for some rules. Of a marker with white space it is the longest word with the
    space around it. `alone`: the marker must be a whole word.
    """

    text: str
    folded: bool
    alone: bool
    rules: tuple[int, ...]

    def is_in(self, word: str, lower: str) -> bool:
        first = (lower if self.folded else word).find(self.text)
        if first < 0 or not self.alone:
            return first >= 0
        spans = _spans_of(self.text, lower if self.folded else word)
        return any(_is_word(lower, start, end) for start, end in spans)


class RuleSet:
    """A set of rules, indexed by their markers. Where two match, the earlier rule wins."""

    def __init__(self, rules: Sequence[Rule]):
        self.rules = tuple(rules)
        self._unmarked = [(rule.gate, i) for i, rule in enumerate(rules) if not rule.markers]
        self._markers = _markers_of(rules, for_long_words=False)
        self._markers_in_long_words = _markers_of(rules, for_long_words=True)
        self._quiet: set[str] = set()  # words without traits
        self._telling: dict[str, Traits] = {}  # others, with each digit as 0, since numbers hardly come again

    def find(self, text: str) -> list[Find]:
        """Return the finds in order, without overlaps."""
        finds: list[Find] = []
        rules = self._rules_for(text)
        lower = fold(text) if rules else ""
        for i in rules:
            rule = self.rules[i]
            for start, end in _matches(rule, lower if rule.folded else text):
                if start == end or (rule.holds is not None and not rule.holds(text, start, end)):
                    continue
                index = bisect_left(finds, start, key=lambda find: find.start)
                overlaps = (index and finds[index - 1].end > start) or (index < len(finds) and finds[index].start < end)
                if not overlaps:
                    finds.insert(index, Find(start, end, rule))
        return finds

    def _rules_for(self, text: str) -> list[int]:
        """Return the numbers of the rules that may match, in order."""
        words = set(text.split())
        words -= self._quiet
        traits: set[int | str] = {"none"}
        if words:
            traits.update(*self._traits_of({word.translate(ALL_ZEROS) for word in words}))
        if "digits" in traits and NUMBER.search(text):
            traits.add("number")
        rules = [trait for trait in traits if isinstance(trait, int) and self.rules[trait].gate in traits]
        rules += [i for gate, i in self._unmarked if gate in traits]
        return sorted(rules)

    def _traits_of(self, words: Collection[str]) -> list[Traits]:
        """Return the traits of words, from memory or looked at now."""
        traits = [remembered for word in words if (remembered := self._telling.get(word)) is not None]
        if len(traits) == len(words):
            return traits
        new = [word for word in words if word not in self._telling]
        if len(self._quiet) + len(self._telling) + len(new) > MAX_WORDS:
            self._quiet.clear()
            self._telling.clear()
        near = _markers_in(" ".join(new), self._markers)
        near_long = _markers_in(
            " ".join([word for word in new if len(word) >= LONG_WORD_CHARS]), self._markers_in_long_words
        )
        for word in new:
            padded = f" {word} "
            lower = padded.lower()
            traits_of_word = _gates_of(word)
            for marker in (*near, *near_long) if "long-word" in traits_of_word else near:
                if marker.is_in(padded, lower):
                    traits_of_word.update(marker.rules)
            traits.append(frozenset(traits_of_word))
            if len(word) <= MAX_WORD_CHARS and traits_of_word:
                self._telling[word] = traits[-1]
            elif len(word) <= MAX_WORD_CHARS:
                self._quiet.add(word)
        return traits


def _markers_of(rules: Sequence[Rule], *, for_long_words: bool) -> list[_Marker]:
    table: dict[tuple[str, bool, bool], list[int]] = {}
    for i, rule in enumerate(rules):
        for marker in rule.markers if (rule.gate == "long-word") == for_long_words else ():
            part = max(re.findall(r"\s?\S+\s?", marker), key=len).translate(ALL_ZEROS)
            key = part, rule.folded, rule.tried == "behind-word" and part == marker
            table.setdefault(key, []).append(i)
    return [_Marker(*key, tuple(numbers)) for key, numbers in table.items()]


def _markers_in(words: str, markers: Sequence[_Marker]) -> list[_Marker]:
    """Return the markers that stand in some of these words."""
    if not words:
        return []
    padded = f" {words} "
    lower = padded.lower()
    return [marker for marker in markers if marker.text in (lower if marker.folded else padded)]


def _gates_of(word: str) -> set[int | str]:
    """Return the gates that a word opens."""
    gates: set[int | str] = set()
    is_long = len(word) >= LONG_WORD_CHARS
    if is_long:
        gates.add("long-word")
    if CODED.search(word):
        gates.add("digits")
        if len(word) >= CODED_WORD_CHARS:
            gates.add("coded-word")
        if is_long and not word.islower() and not word.isupper():
            gates.add("mixed-word")
    if ADDRESS.search(word):
        gates.add("address")
    return gates


def _matches(rule: Rule, text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part that a rule may replace."""
    if rule.tried == "anywhere":
        yield from (match.span(rule.group) for match in rule.pattern.finditer(text))
        return
    for start, end in chain.from_iterable(_spans_of(marker, text) for marker in rule.markers):
        if rule.tried == "behind-word" and not _is_word(text, start, end):
            continue
        match = rule.pattern.match(text, start if rule.tried == "at-marker" else end)
        if match:
            yield match.span(rule.group)
        elif rule.tried == "at-marker" and (span := _over_two_lines(rule, text, start)):
            yield span


def _spans_of(marker: str, text: str) -> Iterator[tuple[int, int]]:
    end = 0
    while (start := text.find(marker, end)) >= 0:
        end = start + len(marker)
        yield start, end


LINE_BREAK = re.compile(r"\\?\r?\n[ \t]{0,40}")
MAX_BROKEN, MIN_PIECE = 300, 8  # characters: of a secret that is looked for over two lines, of its part on each line


def _over_two_lines(rule: Rule, text: str, start: int) -> tuple[int, int] | None:
    """Return the span of a secret that begins at `start` and continues in the next line, or None."""
    line_break = LINE_BREAK.search(text, start, start + MAX_BROKEN)
    if line_break is None or line_break.start() < start + MIN_PIECE:
        return None
    front = text[max(0, start - 1) : line_break.start()]
    match = rule.pattern.match(front + text[line_break.end() : start + MAX_BROKEN], min(start, 1))
    if match is None or match.end() < len(front) + MIN_PIECE:
        return None
    return start, line_break.end() + match.end() - len(front)


def _is_word(text: str, start: int, end: int) -> bool:
    """Return whether no Latin letter stands before, nor after a short word. Scripts without spaces have no borders."""
    if start and _is_latin(text[start]) and _is_latin(text[start - 1]):
        return False
    return not (end - start <= SHORT_WORD and end < len(text) and _is_latin(text[end - 1]) and _is_latin(text[end]))


def _is_latin(character: str) -> bool:
    return character < "\u0250" and character.isalpha()


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


def word_list(text: str) -> tuple[str, ...]:
    """Return the words of `text`."""
    return tuple(text.split())


# Checks of the text after a word such as `password=`: a generated value, a chosen one, or a placeholder.

# A text that begins so is a placeholder, whatever follows.
PLACEHOLDER_STARTS = word_list("your my_ my- my. example xxx *** ... ••• changeme change_me change-me < { [ #{ ./ ~/")
# A text that begins so is a placeholder if only words follow: env.PASSWORD, $DB_PASSWORD, getPassword.
SOURCE_STARTS = word_list(
    "none null true false undefined os. env process. self. config settings secrets. vault get fake dummy sample "
    "test- test_ $ % ( / @ & *"
)
PLACEHOLDER_PARTS = word_list(
    "example placeholder redacted changeme your_ your- xxxx **** .... _here -here ${ {{ }} $( ]( not-a-real "
    "insert_ replace_ [secret: 0000000000 ==="
)
# Words that stand behind "password:" in forms, schemas, messages and settings.
PLACEHOLDER_WORDS = word_list(
    "password passwd pass passwort pwd secret token string text str user username user:pass pass123 required "
    "optional sha1 sha256 sha512 sha-256 md5 base64 utf8 utf-8 bcrypt argon2 argon2id scrypt pbkdf2 oauth2 basic "
    "http2 ldap3 field1 step1 step2 value1 admin root guest postgres localhost"
)
# Measured on identifiers of the standard library: 99 % lie below 3.2 bits. 20 random characters of base 62 have 3.9.
ENTROPY_BITS = 3.3
HEX = re.compile(r"[0-9a-fA-F]{32,128}")
DIGIT, LETTER = re.compile(r"\d"), re.compile(r"[A-Za-z]")
CODE_SIGNS = re.compile(r"[(){}<>\[\];\\]|\w\.\w{3,20}\.\w")
_WORDS = re.compile(
    r"(?:\d{0,4}[A-Z]{0,2}[a-z]{3,20}[\d_.-]{0,4}){2,12}(?:[A-Z]?[a-z]{0,2}\d?)|[A-Z]{2,20}(?:_[A-Z\d]{1,20}){1,8}"
)  # an identifier made of words
MIN_LETTERS_ALONE = 16  # "the password is correcthorsebattery": no sentence goes on with such a word
MAX_LOOKED_AT = 200  # characters of a value whose entropy is counted


def entropy_bits(text: str) -> float:
    """Return the Shannon entropy in bits per character."""
    counts = [text.count(c) for c in set(text)]
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def has_digit_and_letter(value: str) -> bool:
    """Return whether a value has both a digit and a Latin letter."""
    return DIGIT.search(value) is not None and LETTER.search(value) is not None


def is_placeholder(value: str) -> bool:
    """Return whether a text replaces a value: your_key_here, ${TOKEN}, xxxx, or code that reads one."""
    lower = value.lower()
    if lower.startswith(PLACEHOLDER_STARTS) or lower.strip(".,!?:") in PLACEHOLDER_WORDS:
        return True
    if lower.startswith(SOURCE_STARTS) and (is_wordy(value) or "/" in value.strip("/")):
        return True
    return any(part in lower for part in PLACEHOLDER_PARTS) or len(set(lower)) <= 3


def is_wordy(value: str) -> bool:
    """Return whether a value is words separated by signs, each with at most two digits at its end."""
    parts = re.split(r"[\W_]+", value)
    return all(re.fullmatch(r"[^\W\d_]*\d{0,2}", part) and not _is_scrambled(part) for part in parts)


def has_code_signs(value: str) -> bool:
    """Return whether a value looks like code: brackets or attribute access. A password may begin with "("."""
    return CODE_SIGNS.search(value.removeprefix("(") if ")" not in value else value) is not None


def looks_random(value: str) -> bool:
    """Return whether a value seems generated: letters and digits of high entropy, no identifier or placeholder."""
    if not has_digit_and_letter(value) or is_placeholder(value) or has_code_signs(value):
        return False
    if _WORDS.fullmatch(value):
        return False
    return entropy_bits(value[:MAX_LOOKED_AT]) >= ENTROPY_BITS


VOWEL = re.compile("[aeiouyAEIOUY]")
CAPITAL = re.compile("(?<=[a-z])(?=[A-Z])")


def _is_scrambled(value: str) -> bool:
    """Return whether many capitals occur inside words, as in random text."""
    steps = sum(a.islower() and b.isupper() for a, b in pairwise(value))
    if steps < 3:
        return False
    without_vowel = sum(VOWEL.search(part) is None for part in CAPITAL.split(value))
    return len(value) / steps < 3.5 or without_vowel >= 3


def looks_chosen(value: str) -> bool:
    """Return whether a person may have chosen a value as password: letters and digits, six digits, or signs."""
    if is_placeholder(value) or has_code_signs(value):
        return False
    digits, letters = sum(c.isdigit() for c in value), sum(c.isalpha() for c in value)
    signs = len(value) - digits - letters
    if letters == 0:
        return digits >= 6 and signs <= 2
    if digits == signs == 0:
        return _is_scrambled(value)
    return digits > 0 or (signs > 0 and any(c in "!@#$%^&*+=?" for c in value) and any(c.isupper() for c in value))
