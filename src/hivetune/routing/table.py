"""What the gateway knows of a family: its experts, the keys that find them, the router of texts. One sealed file.

`experts/NAME/router.json` below the home is written by whoever trains (experts), whole or not at all.
"""

import functools
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import home
from hivetune.base.sealed import read_sealed, write_sealed
from hivetune.errors import UsageError
from hivetune.routing.domains import one_key, own_keys
from hivetune.routing.router import TextExpert, TextRouter
from hivetune.routing.steps import champion_domains

_FILE = "router.json"


@dataclass(frozen=True)
class ExpertTable:
    """`keys`: kind -> value that a training row declared -> expert, "" where its domain has none, None where several
    domains share it. A value without an expert decides nothing."""

    shared: str
    experts: tuple[str, ...] = ()
    keys: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    router: TextRouter = field(default_factory=TextRouter)


def experts_folder(shared: str) -> Path:
    """What looking for experts of a release leaves."""
    return home() / "experts" / shared


def write_table(table: ExpertTable) -> None:
    """Raises OSError."""
    document = {
        "schema": 1,
        "shared": table.shared,
        "experts": list(table.experts),
        "keys": {kind: dict(values) for kind, values in table.keys.items()},
        "router": _router_document(table.router),
    }
    path = experts_folder(table.shared) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, document)


def read_table(shared: str) -> ExpertTable | None:
    """None where the release has no experts. Raises UsageError for a file that is damaged."""
    path = experts_folder(shared) / _FILE
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return _read(path, status.st_mtime_ns, status.st_size)


def served_table(database: sqlite3.Connection, shared: str) -> ExpertTable:
    """The table as written, with the keys of every expert that is a champion now: they belong to the adapter, and not
    to the rows that the table was made of. Raises UsageError for a file that is damaged."""
    table = read_table(shared) or ExpertTable(shared)
    keys: dict[str, dict[str, str | None]] = {kind: dict(values) for kind, values in table.keys.items()}
    for kind, values in own_keys(champion_domains(database, shared)).items():
        keys.setdefault(kind, {}).update(values)
    return replace(table, keys=keys)


@functools.lru_cache(maxsize=32)
def _read(path: Path, _changed_ns: int, _size_bytes: int) -> ExpertTable:
    """Kept while the file is the same: the gateway asks four times a second."""
    document = read_sealed(path)
    try:
        keys = {
            kind: {one_key(kind, value): expert for value, expert in values.items()}
            for kind, values in document["keys"].items()
        }
        return ExpertTable(document["shared"], tuple(document["experts"]), keys, _router(document["router"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error}", hint="hivetune experts CONFIG --train makes it anew") from None


def _router_document(router: TextRouter) -> dict[str, Any]:
    experts = [
        {
            "name": expert.name,
            "weights": {str(number): weight for number, weight in sorted(expert.weights.items())},
            "line": [expert.bias, expert.slope, expert.offset],
            "threshold": expert.threshold,
            "why_not": expert.why_not,
        }
        for expert in router.experts
    ]
    words = sorted(router.words)
    return {"experts": experts, "words": words, "least_known": router.least_known, "longest": router.longest}


def _router(document: Mapping[str, Any]) -> TextRouter:
    experts = []
    for said in document["experts"]:
        weights = {int(number): float(weight) for number, weight in said["weights"].items()}
        bias, slope, offset = said["line"]
        experts.append(TextExpert(said["name"], weights, bias, slope, offset, said["threshold"], said["why_not"]))
    return TextRouter(tuple(experts), frozenset(document["words"]), document["least_known"], document["longest"])
