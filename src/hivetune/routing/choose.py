"""Who answers a request for a family: a named specialist, else that of a declared key, else by text, else the shared
one.

The choice is pure: the same request in the same state gets the same answer, with the reason that its header tells. What
the gateway knows of a family lies in one sealed file, `experts/NAME/router.json` below the home. Anybody who trains
specialists writes it, whole or not at all.
"""

import functools
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home, write_json
from hivetune.base.sealed import read_sealed, write_sealed
from hivetune.errors import UsageError
from hivetune.release.registry import Release
from hivetune.routing.domains import KEY_KINDS, NAMED_KINDS, declared_keys, one_key, own_keys
from hivetune.routing.steps import champion_domains
from hivetune.routing.text_router import TextRouter, TextSpecialist, route_text

_FILE, _LOOKED = "router.json", "looked.json"


@dataclass(frozen=True)
class SpecialistTable:
    """The specialists of a shared release and how requests find them.

    `keys`: kind -> value that a training row declared -> specialist, "" where its domain has none, None where several
    domains share it. A value without a specialist decides nothing.
    """

    shared: str
    specialists: tuple[str, ...] = ()
    keys: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    router: TextRouter = field(default_factory=TextRouter)


def specialists_folder(shared: str) -> Path:
    """Return the folder below the home for all that looking for specialists of a release leaves."""
    return home() / "experts" / shared


def note_looked_at(shared: Release) -> None:
    """Note that the specialists of this shared adapter were looked at, to the end."""
    write_json(specialists_folder(shared.name) / _LOOKED, {"schema": 1, "shared": shared.adapter_sha256})


def not_looked_at(shared: Release) -> bool:
    """Return whether the specialists of this shared adapter are not decided yet."""
    try:
        return bool(read_sealed(specialists_folder(shared.name) / _LOOKED).get("shared") != shared.adapter_sha256)
    except UsageError:  # not there, or damaged: it is looked again
        return True


def write_table(table: SpecialistTable) -> None:
    """Write the table as a sealed file. Raises OSError."""
    document = {
        "schema": 1,
        "shared": table.shared,
        "experts": list(table.specialists),
        "keys": {kind: dict(values) for kind, values in table.keys.items()},
        "router": _router_document(table.router),
    }
    path = specialists_folder(table.shared) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, document)


def read_table(shared: str) -> SpecialistTable | None:
    """Read the table of a release; None where it has no specialists. Raises UsageError for a file that is damaged."""
    path = specialists_folder(shared) / _FILE
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return _read(path, status.st_mtime_ns, status.st_size)


def served_table(database: sqlite3.Connection, shared: str) -> SpecialistTable:
    """Return the table as written, with the keys of every specialist that is a champion now.

    Keys belong to the adapter, and not to the rows that the table was made of. Raises UsageError for a file that is
    damaged.
    """
    table = read_table(shared) or SpecialistTable(shared)
    keys: dict[str, dict[str, str | None]] = {kind: dict(values) for kind, values in table.keys.items()}
    for kind, values in own_keys(champion_domains(database, shared)).items():
        keys.setdefault(kind, {}).update(values)
    return replace(table, keys=keys)


@functools.lru_cache(maxsize=32)
def _read(path: Path, _changed_ns: int, _size_bytes: int) -> SpecialistTable:
    """Read the file, and cache it until it changes: the gateway reads it four times a second."""
    document = read_sealed(path)
    try:
        keys = {
            kind: {one_key(kind, value): specialist for value, specialist in values.items()}
            for kind, values in document["keys"].items()
        }
        return SpecialistTable(document["shared"], tuple(document["experts"]), keys, _router(document["router"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error}", hint="run hivetune experts CONFIG --train") from None


def _router_document(router: TextRouter) -> dict[str, Any]:
    specialists = [
        {
            "name": specialist.name,
            "weights": {str(number): weight for number, weight in sorted(specialist.weights.items())},
            "line": [specialist.bias, specialist.slope, specialist.offset],
            "threshold": specialist.threshold,
            "why_not": specialist.why_not,
        }
        for specialist in router.specialists
    ]
    word_numbers = sorted(router.words)
    return {"experts": specialists, "words": word_numbers, "least_known": router.least_known, "longest": router.longest}


def _router(document: Mapping[str, Any]) -> TextRouter:
    specialists = []
    for entry in document["experts"]:
        weights = {int(number): float(weight) for number, weight in entry["weights"].items()}
        bias, slope, offset = entry["line"]
        specialists.append(
            TextSpecialist(entry["name"], weights, bias, slope, offset, entry["threshold"], entry["why_not"])
        )
    return TextRouter(tuple(specialists), frozenset(document["words"]), document["least_known"], document["longest"])


@dataclass(frozen=True)
class Asking:
    """The routing keys of a request: its `model`, `keys` as `declared_keys` returns them, and `text`, its last user
    turn.
    """

    model: str
    keys: Mapping[str, str] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Chosen:
    """The name of the answering release, and the reason."""

    model: str
    by: Literal["named", "declared", "session", "text", "shared"]
    reason: str


def question_of(body: Mapping[str, Any], agent: str | None = None) -> Asking:
    """Read the routing keys of an OpenAI request; `agent`: the header X-Hivetune-Agent.

    Fields of another form than the API's are ignored.
    """
    metadata = body.get("metadata")
    meta = metadata if isinstance(metadata, dict) else {}
    messages = body.get("messages")
    turns = [turn for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    system = next((_text(turn) for turn in turns if turn.get("role") in ("system", "developer")), None)
    question = next((_text(turn) for turn in reversed(turns) if turn.get("role") == "user"), "")
    tools = body.get("tools")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    names = [name for f in functions if isinstance(f, dict) and isinstance(name := f.get("name"), str)]
    keys = declared_keys(agent or plain_text(meta.get("agent")), plain_text(meta.get("category")), system, names)
    return Asking(plain_text(body.get("model")) or "", keys, question or plain_text(body.get("prompt")) or "")


def choose(
    tables: Mapping[str, SpecialistTable],
    family: Mapping[str, str],
    question: Asking,
    servable: Collection[str],
    remembered: str | None = None,
) -> Chosen:
    """Choose who answers a request.

    `family`: each name that is or was a specialist's, and its shared release. `servable`: names and labels that are
    loaded. `remembered`: who answered this session before.
    """
    shared = family.get(question.model.partition("@")[0])
    if shared is not None and question.model not in servable:
        return _shared(shared, f"{question.model} can't be served now")
    table = tables.get(question.model)
    if table is None:
        return Chosen(question.model, "named", "named")
    declared, without = _declared(table, question)
    if declared is not None:
        return _if_servable(table, declared, servable)
    choice = _undeclared(table, question.text, servable, remembered)
    return replace(choice, reason="; ".join((choice.reason, *without)))


def _declared(table: SpecialistTable, question: Asking) -> tuple[Chosen | None, list[str]]:
    """Return the specialist of the first key that has one, and as text the agents and categories without one. Such a
    name has no effect, so a request with it is never answered worse.
    """
    without: list[str] = []
    for kind in KEY_KINDS:
        value, owners = question.keys.get(kind), table.keys.get(kind)
        if value is None or owners is None:
            continue
        specialist = owners.get(value)
        if specialist:
            return Chosen(specialist, "declared", f"declared: {_named(kind, value)}"), without
        if kind in NAMED_KINDS:
            unseen = f"no training row had the {kind} {value[:80]!r}"
            without.append(f"{_named(kind, value)} has no expert" if value in owners else unseen)
    return None, without


def _undeclared(table: SpecialistTable, text: str, servable: Collection[str], remembered: str | None) -> Chosen:
    if remembered is not None and (remembered in servable or remembered == table.shared):
        return Chosen(remembered, "session", "as before in this session")
    route = route_text(table.router, text)
    if route.specialist is None:
        return _shared(table.shared, route.reason)
    return _if_servable(table, Chosen(route.specialist, "text", route.reason), servable)


def _named(kind: str, value: str) -> str:
    return f"{kind}={value}" if kind in NAMED_KINDS else f"its {kind}"


def _if_servable(table: SpecialistTable, choice: Chosen, servable: Collection[str]) -> Chosen:
    if choice.model in servable or choice.model == table.shared:
        return choice
    return _shared(table.shared, f"{choice.model} can't be served now ({choice.reason})")


def _shared(shared: str, reason: str) -> Chosen:
    return Chosen(shared, "shared", f"shared adapter: {reason}")


def _text(turn: Mapping[str, Any]) -> str:
    """Return the words of a turn, whose content is a text or a list of parts."""
    content = turn.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def plain_text(value: object) -> str | None:
    """Return the value if it is a text that is not empty."""
    return value if isinstance(value, str) and value else None
