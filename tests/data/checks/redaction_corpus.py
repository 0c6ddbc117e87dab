"""The labelled strings in tests/data/checks/redaction, and how the rules do on them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hivetune.data.checks.redact.apply import PERSONAL, SECRETS

FOLDER = Path(__file__).parent / "redaction"
BREAK = "\u2016"  # stands inside every value, so that scanners of secrets leave the files alone
COVERED = 0.8  # of a value's characters must lie in finds: what is left over tells nothing


@dataclass(frozen=True, slots=True)
class Labelled:
    kind: str
    label: str
    text: str
    values: tuple[str, ...]


def load(name: str) -> list[Labelled]:
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [_labelled(json.loads(line)) for line in lines]


def _labelled(line: dict[str, str | list[str]]) -> Labelled:
    values = tuple(value.replace(BREAK, "") for value in line.get("values", ()))
    return Labelled(str(line["kind"]), str(line["label"]), str(line["text"]).replace(BREAK, ""), values)


def is_found(one: Labelled) -> bool:
    """Whether the finds cover every value, by either set of rules; of clean text: whether there is any find."""
    hidden = {i for rules in (SECRETS, PERSONAL) for find in rules.find(one.text) for i in range(find.start, find.end)}
    if one.kind == "clean":
        return bool(hidden)
    for value in one.values:
        start = one.text.index(value)
        if sum(i in hidden for i in range(start, start + len(value))) < COVERED * len(value):
            return False
    return True


def share_found(entries: Iterable[Labelled], kind: str) -> tuple[int, int]:
    """(found, all) of one kind."""
    chosen = [one for one in entries if one.kind == kind]
    return sum(is_found(one) for one in chosen), len(chosen)
