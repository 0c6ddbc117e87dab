"""The rule and the search for all rules in one text, in linear time.

No rule fires on a high-entropy word alone, because such a rule fires in every other line of prose. A secret has a known
prefix (AKIA, ghp_) or stands behind a word such as `password=`. A number is personal when its checksum and shape are
right, or behind a word that names it.

A rule costs nothing in a text that its gate excludes or that has none of its markers. A pattern that begins at a marker
is tried only there. Every repetition in a pattern has an upper bound (tests/data/checks/test_redact_linear.py), so the
work at each place is bounded: an unbounded rule once took 58 s for a prompt of 4.8 kB.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

Gate = Literal["none", "digits", "number", "address", "coded-word", "long-word", "mixed-word"]
Tried = Literal["anywhere", "at-marker", "behind-marker", "behind-word"]
Check = Callable[[str, int, int], bool]  # (text as it came, start, end) -> whether it is a find

# Patterns of the gates: a rule runs only on a text that its gate lets through.
DIGITS = re.compile(r"\d[\dA-Za-z .()/-]{0,4}\d")
NUMBER = re.compile(r"\d(?:[\d .()/-]{4,20}\d|\d[A-Za-z]\d\d[A-Za-z]\d)")
ADDRESS = re.compile(
    r"[:.-](?:\d{1,3}\.\d|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]|[0-9A-Fa-f]{2}-[0-9A-Fa-f]|[0-9A-Fa-f]{4}\.[0-9A-Fa-f])"
)
CODED = re.compile(r"\d")
CODED_WORD_CHARS, LONG_WORD_CHARS = 12, 20
FEW_NUMBERS = 4
PIECE_CHARS, MIN_SHARED = 4, 2  # of markers: 3 characters stand in too many words
NAME_CHARS = 64  # the longest word that names a number (24), and the 28 characters that may stand between
SHORT_WORD = 5  # letters; a word up to here must not be the beginning of another one ("sin" of "since")


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of find. A text must pass the `gate` and hold one of the `markers`, if there are any.

    `tried` says where the pattern is tried: anywhere, where a marker begins, behind a marker, or behind a marker that
    is a word of its own. `group` is the part to replace. With `folded`, markers and pattern read the text in lower
    case. `holds` checks what would be replaced, such as its checksum.
    """

    name: str
    title: str
    placeholder: str
    pattern: re.Pattern[str]
    markers: tuple[str, ...] = ()
    gate: Gate = "none"
    tried: Tried = "anywhere"
    group: int = 0
    folded: bool = False
    holds: Check | None = None


@dataclass(frozen=True, slots=True)
class Find:
    """A place in a text and the rule that matched there."""

    start: int
    end: int
    rule: Rule


class RuleSet:
    """A set of rules, indexed by their markers. Where two match, the earlier rule wins."""

    def __init__(self, rules: Sequence[Rule]):
        self.rules = tuple(rules)
        behind = {gate: _Markers(rules, gate) for gate in GATES}
        self._behind = {gate: markers for gate, markers in behind.items() if markers}
        self._spaced = _spaced_markers(rules)
        self._always = frozenset(i for i, rule in enumerate(rules) if rule.gate == "none" and not rule.markers)

    def find(self, text: str, telling: str | None = None) -> list[Find]:
        """Return the finds in order, without overlaps. `telling` holds the words that may matter (TellingWords)."""
        lower = fold(text)
        wanted = self._wanted(text, lower, text if telling is None else telling)
        if not wanted:
            return []
        spans = _Spans()
        places: _Places = {}
        for i in sorted(wanted):
            rule = self.rules[i]
            for start, end in _matches(rule, lower if rule.folded else text, places):
                if start < end and (rule.holds is None or rule.holds(text, start, end)):
                    spans.put(start, end, rule)
        return spans.finds

    def _wanted(self, text: str, lower: str, telling: str) -> set[int]:
        """Return the numbers of the rules that may match."""
        wanted = set(self._always)
        if not telling:
            return wanted
        for gate, markers in self._behind.items():
            if part := GATES[gate](text, telling):
                wanted |= markers.wanted(part, lower if part is text else part.lower())
        words = telling.lower()
        wanted.update(
            *[
                rules
                for part, marker, rules, folded in self._spaced
                if part in words and marker in (lower if folded else text)
            ]
        )
        return wanted


def _before_digits(text: str, telling: str) -> str:
    """Return the text before each of the first numbers, where its name stands; the whole text if there are many."""
    if CODED.search(telling) is None:
        return ""
    numbers = [match.start() for match in islice(DIGITS.finditer(text), FEW_NUMBERS + 1)]
    if len(numbers) > FEW_NUMBERS:
        return text
    return "\n".join([text[max(0, start - NAME_CHARS) : start] for start in numbers])


def _with_number(text: str, telling: str) -> str:
    return text if CODED.search(telling) and DIGITS.search(text) and NUMBER.search(text) else ""


def _with_address(text: str, telling: str) -> str:
    return text if ADDRESS.search(telling) else ""


def _coded_words(text: str, telling: str) -> str:
    """Return the whole text if a long word holds a digit."""
    if CODED.search(telling) is None:
        return ""
    return text if any(len(word) >= CODED_WORD_CHARS and CODED.search(word) for word in telling.split()) else ""


def _long_words(_text: str, telling: str) -> str:
    return " ".join([word for word in telling.split() if len(word) >= LONG_WORD_CHARS])


def _mixed_words(text: str, telling: str) -> str:
    """Return the whole text if a long word has a digit and letters of both cases."""
    if CODED.search(telling) is None:
        return ""
    long = [word for word in telling.split() if len(word) >= LONG_WORD_CHARS]
    mixed = any(CODED.search(word) and not word.islower() and not word.isupper() for word in long)
    return text if mixed else ""


# For each gate the part of a text that its markers are searched in; an empty part excludes all its rules.
GATES: dict[Gate, Callable[[str, str], str]] = {
    "none": lambda _text, telling: telling,
    "digits": _before_digits,
    "number": _with_number,
    "address": _with_address,
    "coded-word": _coded_words,
    "long-word": _long_words,
    "mixed-word": _mixed_words,
}


class _Markers:
    """The markers of one gate, each with its rules. Markers with white space are `_spaced_markers`."""

    def __init__(self, rules: Sequence[Rule], gate: Gate):
        mine = [(i, rule) for i, rule in enumerate(rules) if rule.gate == gate]
        self._unmarked = frozenset(i for i, rule in mine if not rule.markers)
        marked = [(m, i, rule.folded) for i, rule in mine for m in rule.markers if gate != "none" or not is_spaced(m)]
        exact = _table((marker, i) for marker, i, is_folded in marked if not is_folded)
        folded = _table((marker, i) for marker, i, is_folded in marked if is_folded)
        self._exact = _by_piece(exact)
        self._folded = _by_piece({marker: found for marker, found in folded.items() if marker.isascii()})
        self._beyond_ascii = _by_piece({marker: found for marker, found in folded.items() if not marker.isascii()})

    def __bool__(self) -> bool:
        return bool(self._unmarked or self._exact or self._folded or self._beyond_ascii)

    def wanted(self, part: str, lower: str) -> set[int]:
        found = set(self._unmarked)
        found.update(*_found(self._exact, part), *_found(self._folded, lower))
        if self._beyond_ascii and not lower.isascii():
            found.update(*_found(self._beyond_ascii, lower))
        return found


# A piece of text with the markers that contain it: a text without the piece has none of them.
_Pieces = tuple[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], ...]


def _by_piece(table: dict[str, tuple[int, ...]]) -> _Pieces:
    """Return the markers grouped by pieces that several of them share, the most common piece first."""
    left, pieces = dict(table), []
    while left:
        counts = Counter(piece for marker in left for piece in _pieces_of(marker))
        most, count = max(counts.items(), key=lambda item: (item[1], item[0]), default=("", 0))
        if count < MIN_SHARED:
            break
        pieces.append((most, tuple((marker, left.pop(marker)) for marker in [m for m in left if most in m])))
    return (*pieces, *((marker, ((marker, rules),)) for marker, rules in left.items()))


def _pieces_of(marker: str) -> set[str]:
    return {marker[i : i + PIECE_CHARS] for i in range(len(marker) - PIECE_CHARS + 1)}


def _found(pieces: _Pieces, text: str) -> list[tuple[int, ...]]:
    """Return the rules of all markers in a text."""
    near = [markers for piece, markers in pieces if piece in text]
    return [rules for markers in near for marker, rules in markers if marker in text]


def _table(pairs: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    table: dict[str, tuple[int, ...]] = {}
    for marker, i in pairs:
        table[marker] = (*table.get(marker, ()), i)
    return table


def is_spaced(marker: str) -> bool:
    return any(c.isspace() for c in marker)


def longest_part(marker: str) -> str:
    """Return the longest word of a marker."""
    return max(marker.split(), key=len)


def _spaced_markers(rules: Sequence[Rule]) -> tuple[tuple[str, str, tuple[int, ...], bool], ...]:
    """Return (longest word, marker, rules, folded) of each marker with white space that has no gate."""
    return tuple(
        (longest_part(marker).lower(), marker, numbers, folded)
        for folded in (False, True)
        for marker, numbers in _table(
            (m, i)
            for i, r in enumerate(rules)
            if r.gate == "none" and r.folded == folded
            for m in r.markers
            if is_spaced(m)
        ).items()
    )


# Where markers stand in a text, since several rules have the same markers.
_Places = dict[tuple[bool, tuple[str, ...]], list[tuple[int, int]]]


def _matches(rule: Rule, text: str, places: _Places) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part that a rule may replace."""
    if rule.tried == "anywhere":
        yield from (match.span(rule.group) for match in rule.pattern.finditer(text))
        return
    key = rule.folded, rule.markers
    if key not in places:
        places[key] = list(_places_of(rule.markers, text))
    for place, end in places[key]:
        if rule.tried != "behind-word" or _is_word(text, place, end):
            match = rule.pattern.match(text, place if rule.tried == "at-marker" else end)
            if match:
                yield match.span(rule.group)
            elif rule.tried == "at-marker" and (span := _over_two_lines(rule, text, place)):
                yield span


LINE_BREAK = re.compile(r"\\?\r?\n[ \t]{0,40}")
MAX_BROKEN, MIN_PIECE = 300, 8  # characters: of a secret that is looked for over two lines, of its part on each line


def _over_two_lines(rule: Rule, text: str, place: int) -> tuple[int, int] | None:
    """Return the span of a secret that begins at `place` and goes on in the next line, or None."""
    line_break = LINE_BREAK.search(text, place, place + MAX_BROKEN)
    if line_break is None or line_break.start() < place + MIN_PIECE:
        return None
    front = text[max(0, place - 1) : line_break.start()]
    match = rule.pattern.match(front + text[line_break.end() : place + MAX_BROKEN], min(place, 1))
    if match is None or match.end() < len(front) + MIN_PIECE:
        return None
    return place, line_break.end() + match.end() - len(front)


def _places_of(markers: Sequence[str], text: str) -> Iterator[tuple[int, int]]:
    for marker in markers:
        place = text.find(marker)
        while place >= 0:
            end = place + len(marker)
            yield place, end
            place = text.find(marker, end)


def _is_word(text: str, start: int, end: int) -> bool:
    """Return whether no Latin letter stands before, nor after a short word. Scripts without spaces have no borders."""
    if start and _is_latin(text[start]) and _is_latin(text[start - 1]):
        return False
    return not (end - start <= SHORT_WORD and end < len(text) and _is_latin(text[end - 1]) and _is_latin(text[end]))


def _is_latin(character: str) -> bool:
    return character < "\u0250" and character.isalpha()


class _Spans:
    """The finds of a text in order; a find that overlaps an earlier one is left out."""

    def __init__(self) -> None:
        self.finds: list[Find] = []

    def put(self, start: int, end: int, rule: Rule) -> None:
        place = bisect_left(self.finds, start, key=lambda find: find.start)
        if place and self.finds[place - 1].end > start:
            return
        if place < len(self.finds) and self.finds[place].start < end:
            return
        self.finds.insert(place, Find(start, end, rule))


def fold(text: str) -> str:
    """Return `text` in lower case with the same length: characters that would grow (U+0130) stay as they are."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(low if len(low := c.lower()) == 1 else c for c in text)


def redact_text(text: str, rules: RuleSet) -> str:
    """Return `text` with a placeholder for each find."""
    return replace_finds(text, rules.find(text))


def replace_finds(text: str, finds: Sequence[Find]) -> str:
    """Return `text` with the placeholder of each find; `finds` are in order."""
    pieces, position = [], 0
    for find in finds:
        pieces += [text[position : find.start], find.rule.placeholder]
        position = find.end
    return "".join([*pieces, text[position:]]) if pieces else text


MAX_WORDS = 10_000  # of each kind; 1 MB
MAX_NEW, LEARNED_WORDS = 64, 8  # words of one text; with more new ones the whole text is searched
MAX_REMEMBERED_CHARS = 60  # longer words hardly come again
LONGER_LOWER = "\u0130"  # the one character whose lower case has another length: `fold` then reads a text otherwise


class TellingWords:
    """A memory of words that can't matter to some rules: without a digit, an address, a marker or a part of one.

    Most words of a file come again and again. Searching only the other words takes a quarter of the time for prose.
    """

    def __init__(self, rules: Sequence[Rule]):
        markers = [(marker, rule.folded) for rule in rules if rule.gate == "none" for marker in rule.markers]
        self._exact = tuple(dict.fromkeys(m for m, folded in markers if not folded and not is_spaced(m)))
        of_long = [longest_part(marker) for rule in rules if rule.gate == "long-word" for marker in rule.markers]
        self._of_long = tuple(dict.fromkeys(part.lower() for part in of_long))
        self._folded = tuple(dict.fromkeys(m for m, folded in markers if folded and not is_spaced(m)))
        parts = dict.fromkeys(_pattern(marker.lower()) for marker, _ in markers if is_spaced(marker))
        self._parts = re.compile("|".join(parts) or r"(?!)")
        self._quiet: set[str] = set()
        self._telling: set[str] = set()
        self._last = ("", "")

    def of(self, text: str) -> str:
        """Return the words of `text` that may matter, in any order."""
        last, told = self._last
        if last == text:  # secrets and personal data are looked for one after the other
            return told
        if LONGER_LOWER in text:
            return text
        words = set(text.split())
        words -= self._quiet
        new = words - self._telling
        if len(new) > MAX_NEW:
            return text
        if new:
            words -= self._learned(new)
        told = " ".join(words)
        self._last = text, told
        return told

    def _learned(self, new: Collection[str]) -> set[str]:
        """Return the words of `new` that can't matter, and remember all of them."""
        if max(len(self._quiet), len(self._telling)) + len(new) > MAX_WORDS:
            self._quiet.clear()
            self._telling.clear()
        plain = {word for word in new if len(word) <= MAX_REMEMBERED_CHARS and CODED.search(word) is None}
        # All at once first; only if that finds a marker, a few of them one by one (2 us each).
        looked_at, quiet = plain, plain
        if self._may_match(" ".join(plain)):
            looked_at = set(islice(plain, LEARNED_WORDS))
            quiet = {word for word in looked_at if not self._may_match(word)}
        self._quiet |= quiet
        self._telling |= looked_at - quiet  # words with digits hardly come again
        return quiet

    def _may_match(self, text: str) -> bool:
        """Return whether a rule may match in words without digits."""
        lower = text.lower()
        if len(text) >= LONG_WORD_CHARS and any([part in lower for part in self._of_long]):
            return True
        return (
            any([marker in text for marker in self._exact])
            or any([marker in lower for marker in self._folded])
            or ADDRESS.search(text) is not None
            or self._parts.search(lower) is not None
        )


def _pattern(marker: str) -> str:
    """Return the pattern of a word that holds the longest part of a marker: "-k" alone for " -k "."""
    part = longest_part(marker)
    front, _, behind = marker.partition(part)
    return ("" if not front else r"(?<!\S)") + re.escape(part) + ("" if not behind else r"(?!\S)")
