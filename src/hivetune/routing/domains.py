"""Domains of rows by what was declared of them (agent, category, system prompt, tools), never by a guess.

A cluster of texts looks like a domain and may be none. A request can ask for what somebody declared of a row.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

from hivetune.judge.statistics import MIN_SEQUENTIAL
from hivetune.records import Split

KeyKind = Literal["agent", "category", "system", "tools"]
KEY_KINDS: tuple[KeyKind, ...] = get_args(KeyKind)
NAMED_KINDS = ("agent", "category")  # people write these values themselves
MIN_ROWS = 200
# Held-out sessions before a fork is worth its minutes: they see 0.05 nats a token where sessions differ by 0.08.
MIN_SESSIONS = MIN_SEQUENTIAL
MAX_SLUG = 24
_SHOWN_CHARS = 48


@dataclass(frozen=True)
class KeyedRow:
    """One row of the input with its declarations.

    `numbers`: its rows in the snapshot. `group`: its session, or itself. `keys`: its declarations. `text`: its last
    question.
    """

    id: str
    split: Split
    group: str
    numbers: tuple[int, ...]
    keys: Mapping[str, str]
    text: str


@dataclass(frozen=True)
class RowDomain:
    """The rows with one of these values under one kind of key.

    `title`: a text for a value that is a hash.
    """

    kind: KeyKind
    values: tuple[str, ...]
    title: str = ""

    @property
    def label(self) -> str:
        return f"{self.kind}={self.title or '|'.join(self.values)}"

    @property
    def slug(self) -> str:
        """Return the part of a release's name: letters and digits of the title, with a hash where they are not all of
        it.
        """
        title = self.title or "-".join(self.values)
        plain = "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in title.lower()).split())
        if plain and plain == title and len(plain) <= MAX_SLUG:
            return plain
        return f"{plain[:MAX_SLUG].strip('-')}-{_hash(self.kind + chr(0) + chr(0).join(self.values), 3)}".strip("-")

    def has(self, keys: Mapping[str, str]) -> bool:
        return keys.get(self.kind) in self.values


def declared_keys(agent: str | None, category: str | None, system: str | None, tools: Iterable[str]) -> dict[str, str]:
    """Return the declarations of a row or a request.

    A system prompt and a set of tools count as their hashes, since texts are long.
    """
    names = sorted(set(tools))
    values = {
        "agent": one_key("agent", agent or ""),
        "category": one_key("category", category or ""),
        "system": _hash(" ".join(system.split()), 8) if system and system.strip() else None,
        "tools": _hash("\0".join(names), 8) if names else None,
    }
    return {kind: value for kind, value in values.items() if value}


def one_key(kind: str, value: str) -> str:
    """Return a value as all are compared: names of agents and categories without regard to case and spaces around
    them.
    """
    return " ".join(value.split()).casefold() if kind in NAMED_KINDS else value


def own_keys(specialists: Mapping[str, RowDomain]) -> dict[str, dict[str, str]]:
    """Return kind -> value -> the specialist whose domain has that value, whatever rows there are today.

    Where two specialists have the value, the one with fewer values gets it.
    """
    owners: dict[str, dict[str, str]] = {}
    for name, domain in sorted(specialists.items(), key=lambda pair: -len(pair[1].values)):
        owners.setdefault(domain.kind, {}).update({one_key(domain.kind, value): name for value in domain.values})
    return owners


def title_of(kind: KeyKind, system: str | None, tools: Iterable[str]) -> str:
    """Return a text for a key that is a hash; empty for other keys."""
    if kind == "system":
        title = " ".join((system or "").split())
    elif kind == "tools":
        title = ", ".join(sorted(set(tools)))
    else:
        return ""
    return title if len(title) <= _SHOWN_CHARS else f"{title[: _SHOWN_CHARS - 4]} ..."


def choose_kind(rows: Sequence[KeyedRow], by: str) -> KeyKind | None:
    """Return `by`, or for "auto" the first kind with at least two values among the rows."""
    for kind in KEY_KINDS:
        if by == kind or (by == "auto" and len({row.keys.get(kind) for row in rows} - {None}) > 1):
            return kind
    return None


def domains_of(rows: Sequence[KeyedRow], kind: KeyKind, titles: Mapping[str, str]) -> list[RowDomain]:
    """Return one domain for each value, the largest first.

    `titles`: value -> words, for values that are hashes.
    """
    counts = Counter(row.keys[kind] for row in rows if kind in row.keys)
    ordered = sorted(counts, key=lambda value: (-counts[value], value))
    return [RowDomain(kind, (value,), titles.get(value, "")) for value in ordered]


def too_small(rows: Sequence[KeyedRow]) -> str:
    """Return why a domain has too few rows to test for a specialist; empty if it has enough."""
    if len(rows) < MIN_ROWS:
        return f"{len(rows)} of {MIN_ROWS} rows"
    sessions = len({row.group for row in rows if row.split == "validation"})
    if sessions < MIN_SESSIONS:
        return f"{sessions} of {MIN_SESSIONS} independent sessions in validation"
    return ""


def _hash(text: str, size: int) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
