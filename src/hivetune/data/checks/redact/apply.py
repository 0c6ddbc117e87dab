"""Applies the rules to everything of a row that reaches tokens, and says what was found where."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, Literal

from hivetune.data.checks.redact.contact import CONTACT_RULES, PHONE_RULES
from hivetune.data.checks.redact.keyed import KEYED_RULES
from hivetune.data.checks.redact.numbers import NUMBER_RULES
from hivetune.data.checks.redact.rules import RuleSet, replace_finds
from hivetune.data.checks.redact.secrets import LAST_RULES, SECRET_RULES
from hivetune.data.checks.redact.words import TellingWords
from hivetune.data.reasons import RowRefused
from hivetune.records import Example, Message

Policy = Literal["redact", "reject", "keep"]
PLACES = {"system": "the system prompt", "user": "the question", "assistant": "the answer", "tool": "a tool's result"}
NOT_TEXT = ("role", "weight")
TEXT_FIELDS = tuple(field.name for field in fields(Message) if field.name not in NOT_TEXT)
_fields_of = attrgetter(*TEXT_FIELDS)
BORDER = "\n\0\n"  # no find crosses it: a row without tools is looked at in one piece, and most have nothing to find
# Names of values that tell rows apart: a name such as session_id makes no secret of what stands behind it.
ROW_NAMES = re.compile(r"(?:id|ids|session|user|uuid|hash|digest|checksum|time|timestamp)\Z")
ADVICE = {"secret": "revoke it", "personal": "check that the row still makes sense"}
SECRETS = RuleSet((*SECRET_RULES, *KEYED_RULES, *LAST_RULES))
PERSONAL = RuleSet((*CONTACT_RULES, *NUMBER_RULES, *PHONE_RULES))
EVERYTHING = RuleSet((*SECRETS.rules, *PERSONAL.rules))
TELLING = TellingWords(EVERYTHING.rules)
MAX_NOTES = 5  # kinds of finds told of one row; more of them are counted


def apply_policy(example: Example, rules: RuleSet, policy: Policy, reason: str) -> tuple[Example, tuple[str, ...]]:
    """The example after `policy`, and what was found where, such as "GitHub token in the answer".

    The very same example when there was nothing to do. Covers messages with all their fields, tool definitions and the
    checker (whose expected value must go the way of the answer's). Raises RowRefused(reason) under "reject".
    """
    if policy == "keep" or holds_nothing(example, rules):
        return example, ()
    walk = _Walk(rules)
    messages = [walk.message(message, number) for number, message in enumerate(example.messages, start=1)]
    tools = walk.value(example.tools, "a tool's definition")
    checker = walk.value(example.checker, "the checker")
    if not walk.notes:
        return example, ()
    notes = _told(walk.notes)
    if policy == "reject":
        raise RowRefused(reason, f"{', '.join(notes)}: remove it" + (" and revoke it" if reason == "secret" else ""))
    return replace(example, messages=tuple(messages), tools=tuple(tools), checker=checker), notes


def holds_nothing(example: Example, rules: RuleSet) -> bool:
    """Whether none of `rules` finds anything in a row, told by one look at all of its text; False where only a walk
    through its parts can tell. Most rows hold nothing: a look for EVERYTHING takes two thirds of one for each kind.
    """
    text = _plain_text(example)
    return text is not None and not rules.find(text, TELLING.of(text))


def _plain_text(example: Example) -> str | None:
    """All that reaches tokens, if it is text without names that say what a value is."""
    if example.tools or example.checker:
        return None
    values = [value for message in example.messages for value in _fields_of(message) if value]
    return BORDER.join(values) if all([isinstance(value, str) for value in values]) else None


def redact_value(value: Any, rules: RuleSet) -> Any:
    """Every text inside a JSON value, redacted; the same object when nothing was found."""
    return _Walk(rules).value(value, "")


def redacted_name(name: str) -> str:
    """The name of a user or a session as the store keeps it: one that holds personal data or a secret is redacted like
    a text, and keeps a hash by which it can be told from others and forgotten."""
    clean = str(redact_value(redact_value(name, SECRETS), PERSONAL))
    if clean == name:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{clean} {digest}"


def _told(notes: Sequence[str]) -> tuple[str, ...]:
    """Each note once, the first few."""
    once = tuple(dict.fromkeys(notes))
    return once if len(once) <= MAX_NOTES else (*once[:MAX_NOTES], f"and {len(once) - MAX_NOTES} more")


class _Walk:
    """One pass over the parts of a row; `notes` gathers what was found where."""

    def __init__(self, rules: RuleSet):
        self._rules = rules
        self.notes: list[str] = []

    def message(self, message: Message, number: int) -> Message:
        place = PLACES[message.role]
        changed: dict[str, Any] = {}
        for name in TEXT_FIELDS:  # whatever a message will hold one day is covered too
            value = getattr(message, name)
            if not value:
                continue
            inside = place if name == "content" else f"{_spoken(name)} of {place}"
            cleaned = self.value(value, f"{inside} (message {number})")
            if cleaned is not value:
                changed[name] = cleaned
        return replace(message, **changed) if changed else message

    def value(self, value: Any, place: str, key: str = "") -> Any:
        """`value` redacted. `key`: the name that it stands behind, which may say what it is: {"password": "x"}."""
        if isinstance(value, str):
            return self._text(value, place, key)
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        if isinstance(value, list | tuple):
            items = [self.value(item, place, key) for item in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, int) and not isinstance(value, bool):
            shown = str(value) if abs(value) < 10**40 else ""  # nothing personal has more digits
            cleaned = self._text(shown, place, key)
            return value if cleaned == shown else cleaned
        return value

    def _mapping(self, value: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        items: dict[str, Any] = {}
        same = True
        for key, item in value.items():
            name = _free_name(self._text(key, place, ""), items)
            items[name] = self.value(item, place, key)
            same = same and name == key and items[name] is item
        return value if same else items

    def _text(self, text: str, place: str, key: str) -> str:
        front = f"{key}: " if key and not ROW_NAMES.search(key.lower()) else ""
        finds = [find for find in self._rules.find(front + text) if find.start >= len(front)]
        if not finds:
            return text
        self.notes += [f"{find.rule.title} in {place}" for find in finds]
        return replace_finds(front + text, finds)[len(front) :]


def _spoken(field: str) -> str:
    return {"tool_calls": "a tool call", "name": "the name", "tool_call_id": "the call id"}.get(field, f"the {field}")


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """Two keys that become one placeholder stay two."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} {number}"
    return free
