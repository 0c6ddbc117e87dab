"""The redaction of a row: redaction.toml applied to everything that becomes tokens, with notes of each find."""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from hivetune.data.checks.finds import CHECKS, TABLE, Check, is_token
from hivetune.data.reasons import RowRefused
from hivetune.records import Example, Message

Policy = Literal["redact", "reject", "keep"]
TITLES = {"system": "the system prompt", "user": "the question", "assistant": "the answer", "tool": "a tool's result"}
FIELD_TITLES = {"tool_calls": "a tool call", "name": "the name", "tool_call_id": "the call id"}
NOT_TEXT = ("role", "weight")
TEXT_FIELDS = tuple(field.name for field in fields(Message) if field.name not in NOT_TEXT)
_fields_of = attrgetter(*TEXT_FIELDS)
BORDER = "\n\0\n"  # no find crosses it, so that the texts of a row can be searched at once
# Names of values that only identify something: a value after session_id is not a secret.
ROW_NAMES = re.compile(r"(?:id|ids|session|user|uuid|hash|digest|checksum|time|timestamp)\Z")
ADVICE = {"secret": "revoke it", "personal": "check that the row still makes sense"}
MAX_NOTES = 5  # kinds of finds named per row; further kinds are counted
LONG_WORD = 15  # characters; no token is shorter
HEAD = re.compile(r"(?a)(?<![A-Za-z0-9_])(?=(\S\S))")  # the first two characters of what may be a token
DIGITS = re.compile(r"\d\D{0,2}\d")
Note = tuple[str, str]  # a reason for a change, and what was changed where
Gate = Literal["text", "folded", "digits", "long-word"]
Sign = tuple[tuple[str, ...], re.Pattern[str], list[int]]  # markers, what must occur besides, and rules by number
Place = Literal["anywhere", "marker", "behind"]  # of a match: where a marker begins, or behind it


@dataclass(frozen=True)
class Rule:
    """One kind of secret or personal data; redaction.toml describes the fields.

    To save time, `regex` is searched only in a text that contains one of the markers and the sign `needs`, within the
    part that `gate` selects: "folded" is the text in lower case, "digits" a text with at least two digits, "long-word"
    the words of at least LONG_WORD characters.
    """

    name: str
    title: str
    placeholder: str
    regex: str
    markers: tuple[str, ...] = ()
    gate: Gate = "text"
    at: Place = "anywhere"
    group: int = 0
    holds: Check | None = None
    needs: str = ""

    @property
    def kind(self) -> str:
        return "secret" if self.placeholder.startswith("[SECRET:") else "personal"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The compiled `regex`: few rules are tried in a text, and to compile all takes 0.1 s, a third of a start."""
        return re.compile(self.regex)

    def matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each part that may be replaced."""
        if self.at == "anywhere":
            yield from (match.span(self.group) for match in self.pattern.finditer(text))
            return
        for marker in self.markers:
            end = 0
            while (start := text.find(marker, end)) >= 0:
                end = start + len(marker)
                if match := self.pattern.match(text, end if self.at == "behind" else start):
                    yield match.span(self.group)


@dataclass(frozen=True, slots=True)
class Find:
    """A match of a rule: its place in a text, and the rule."""

    start: int
    end: int
    rule: Rule


class RuleSet:
    """A set of rules. If two rules match at the same place, the earlier rule is used."""

    def __init__(self, rules: Sequence[Rule]):
        self.rules = tuple(rules)
        # Most texts hold no sign of any rule. To ask each of 130 rules takes 70 us for 500 characters, so rules with
        # the same signs are asked together, and those of tokens by the first two characters of their markers.
        self._by_head: dict[str, list[int]] = {}
        by_sign: dict[tuple[Gate, tuple[str, ...], str], list[int]] = {}
        for number, rule in enumerate(rules):
            if rule.gate == "long-word" and rule.at == "marker":
                for head in {marker[:2] for marker in rule.markers}:
                    self._by_head.setdefault(head, []).append(number)
            else:
                by_sign.setdefault((rule.gate, rule.markers, rule.needs), []).append(number)
        self._signs: dict[Gate, list[Sign]] = {}
        for (gate, markers, needs), numbers in by_sign.items():
            self._signs.setdefault(gate, []).append((markers or ("",), re.compile(needs), numbers))

    def find(self, text: str) -> list[Find]:
        """Return the finds in order, without overlaps."""
        finds: list[Find] = []
        lower = _fold(text)
        for rule in self._tried(text, lower):
            for start, end in rule.matches(lower if rule.gate == "folded" else text):
                if start == end or (rule.holds is not None and not rule.holds(text, start, end)):
                    continue
                index = bisect_left(finds, start, key=lambda find: find.start)
                overlaps = (index and finds[index - 1].end > start) or (index < len(finds) and finds[index].start < end)
                if not overlaps:
                    finds.insert(index, Find(start, end, rule))
        return finds

    def _tried(self, text: str, lower: str) -> list[Rule]:
        """Return the rules whose marker occurs in the text, in order."""
        long_words = " ".join([word for word in text.split() if len(word) >= LONG_WORD])
        gates = {"text": text, "folded": lower, "digits": text if DIGITS.search(text) else "", "long-word": long_words}
        numbers: set[int] = set()
        for gate, signs in self._signs.items():
            looked_at = gates[gate]
            for markers, needs, rules in signs if looked_at else ():
                for marker in markers:
                    if marker in looked_at:
                        if needs.search(text):
                            numbers.update(rules)
                        break
        for head in self._by_head.keys() & HEAD.findall(long_words) if long_words else ():
            numbers.update(self._by_head[head])
        return [self.rules[number] for number in sorted(numbers)]


def _fold(text: str) -> str:
    """Return `text` in lower case with the same length: characters that would grow (U+0130) stay as they are."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(low if len(low := c.lower()) == 1 else c for c in text)


def _rules(kind: str, **more: Any) -> Iterator[Rule]:
    """Yield the rules of one of the arrays `blocks`, `named` and `personal`."""
    for entry in TABLE[kind]:
        regex = entry["regex"]
        for name, part in reversed(TABLE["parts"].items()):  # a part uses only earlier ones
            regex = regex.replace(f"<{name}>", part)
        markers = entry.get("markers", ())
        markers = TABLE["markers"][markers].split() if isinstance(markers, str) else markers
        changed = {"regex": regex, "markers": tuple(markers), "holds": CHECKS[entry["holds"]]}
        yield Rule(**{"placeholder": f"[SECRET:{entry['name']}]", **more, **entry, **changed})


def _tokens() -> Iterator[Rule]:
    places: Sequence[tuple[str, Place, int]] = (("tokens", "marker", 0), ("inside", "anywhere", 1))
    for kind, place, group in places:
        for name, title, keywords, regex in TABLE[kind]:
            pattern = rf"(?a)(?<![A-Za-z0-9_])(?:{regex})" if place == "marker" else f"(?a){regex}"
            markers = tuple(keywords.split())
            yield Rule(name, title, f"[SECRET:{name}]", pattern, markers, "long-word", place, group, is_token)


NAMED: Mapping[str, Any] = {"gate": "folded", "at": "behind", "group": 1}
RULES = RuleSet((*_rules("blocks", at="marker"), *_tokens(), *_rules("named", **NAMED), *_rules("personal")))


def apply_policy(example: Example, policy: Policy) -> tuple[Example, tuple[Note, ...]]:
    """Return the example with `policy` applied, and a note for each kind of secret or personal data, with its places.

    All fields of messages, tool definitions and the checker are searched: the checker's expected value must stay equal
    to the answer's. Raise RowRefused if the policy is "reject".
    """
    if policy == "keep" or _holds_nothing(example):
        return example, ()
    walk = _Walk()
    messages = tuple(walk.message(message, number) for number, message in enumerate(example.messages, start=1))
    tools = walk.value(example.tools, "a tool's definition")
    checker = walk.value(example.checker, "the checker")
    notes = []
    for kind, advice in ADVICE.items():
        finds = list(dict.fromkeys(text for one, text in walk.notes if one == kind))
        more = [f"and {len(finds) - MAX_NOTES} more"] if finds[MAX_NOTES:] else []
        named = ", ".join([*finds[:MAX_NOTES], *more])
        if finds and policy == "reject":
            raise RowRefused("private", f"{named}: remove it" + (" and revoke it" if kind == "secret" else ""))
        if finds:
            notes.append((f"redacted-{kind}", f"{named}; {advice}"))
    if notes:
        example = replace(example, messages=messages, tools=tools, checker=checker)
    return example, tuple(notes)


def _holds_nothing(example: Example) -> bool:
    """Return True if one search of the whole text finds nothing; False also if each part must be searched."""
    if example.tools or example.checker:
        return False  # named values, whose names decide what they are
    values = [value for message in example.messages for value in _fields_of(message) if value]
    return all([isinstance(value, str) for value in values]) and not RULES.find(BORDER.join(values))


def redact_everything(value: Any) -> Any:
    """Return a JSON value without secrets and personal data; the same object if nothing was found."""
    return _Walk().value(value, "")


def redacted_name(name: str) -> str:
    """Return the name of a user or session in the form in which it is stored.

    If the name contains personal data or a secret, it is redacted and a hash is appended, so that it stays unique and
    can be forgotten by its name.
    """
    clean = str(redact_everything(name))
    if clean == name:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{clean} {digest}"


class _Walk:
    """One pass over the parts of a row. `notes` collects the kinds and places of the finds."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []

    def message(self, message: Message, number: int) -> Message:
        title = TITLES[message.role]
        changed: dict[str, Any] = {}
        for name in TEXT_FIELDS:  # so fields that messages get later are covered too
            inside = title if name == "content" else f"{FIELD_TITLES.get(name, f'the {name}')} of {title}"
            value = getattr(message, name)
            cleaned = self.value(value, f"{inside} (message {number})")
            if cleaned is not value:
                changed[name] = cleaned
        return replace(message, **changed) if changed else message

    def value(self, value: Any, title: str, key: str = "") -> Any:
        """Return `value` redacted. `key`: the name before it, which may identify a secret: {"password": "x"}."""
        if isinstance(value, str):
            return self._text(value, title, key)
        if isinstance(value, Mapping):
            return self._mapping(value, title)
        if isinstance(value, list | tuple):
            items = [self.value(item, title, key) for item in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, int) and not isinstance(value, bool):
            shown = str(value) if abs(value) < 10**40 else ""  # nothing personal has more digits
            cleaned = self._text(shown, title, key)
            return value if cleaned == shown else cleaned
        return value

    def _mapping(self, value: Mapping[str, Any], title: str) -> Mapping[str, Any]:
        items: dict[str, Any] = {}
        same = True
        for key, item in value.items():
            name = clean = self._text(key, title, "")
            number = 1
            while name in items:  # two keys that become the same placeholder stay two keys
                number += 1
                name = f"{clean} {number}"
            items[name] = self.value(item, title, key)
            same = same and name == key and items[name] is item
        return value if same else items

    def _text(self, text: str, title: str, key: str) -> str:
        front = f"{key}: " if key and not ROW_NAMES.search(key.lower()) else ""
        # A secret may hide what is personal, such as a number behind its digits, and a placeholder is not a secret.
        for kinds in (tuple(ADVICE), ("personal",)) if text else ():
            text = front + text
            finds = [find for find in RULES.find(text) if find.start >= len(front) and find.rule.kind in kinds]
            self.notes += [(find.rule.kind, f"{find.rule.title} in {title}") for find in finds]
            pieces, position = [], len(front)
            for find in finds:
                pieces += [text[position : find.start], find.rule.placeholder]
                position = find.end
            text = "".join([*pieces, text[position:]])
            if not finds:
                break
        return text
