"""Reads topic packs: the 24 that come with Hivetune and those of a user, with the place of every mistake."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from hivetune.base.paths import expanded
from hivetune.errors import UsageError
from hivetune.synth.make.draft import DRAFT_KINDS, KIND_WEIGHTS
from hivetune.synth.sources.places import Library

_LISTS = ("pages", "documents", "modules", "help")
PACK_KEYS = ("category", "title", "install", "weight", *_LISTS, "kinds", "fact")
_FACT_KEYS = ("question", "answer", "source")


@dataclass(frozen=True, slots=True)
class WrittenFact:
    """A question that a person answered; `source`: the page that confirms it, as systemctl(1)."""

    question: str
    answer: str
    source: str


@dataclass(frozen=True, slots=True)
class Pack:
    """A category: its documentation, the packages to install for it, and the weights of its kinds of questions."""

    category: str
    title: str
    where: str
    install: str = ""
    weight: float = 1.0
    pages: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    help: tuple[str, ...] = ()
    kinds: Mapping[str, float] = field(default_factory=dict)
    facts: tuple[WrittenFact, ...] = ()

    def kind_weight(self, kind: str) -> float:
        return float(self.kinds.get(kind, KIND_WEIGHTS[kind]))


def shipped_packs() -> list[Pack]:
    """Return the packs that come with Hivetune, by category."""
    files_here = [entry for entry in files(__package__).iterdir() if entry.name.endswith(".toml")]
    return [
        parse_pack(entry.read_text(encoding="utf-8"), entry.name) for entry in sorted(files_here, key=lambda e: e.name)
    ]


def parse_pack(text: str, where: str) -> Pack:
    """Read a pack. Raises UsageError that names the file, the key and the nearest known one."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not TOML: {error}", hint="see docs/synth.md for an example of a pack") from None
    _check_keys(tree, PACK_KEYS, where)
    category, kinds, facts = tree.get("category"), tree.get("kinds", {}), tree.get("fact", [])
    if not isinstance(category, str) or not category.strip():
        raise UsageError(f"{where}: 'category' is missing", hint='begin with: category = "my-topic"')
    for key in _LISTS:
        value = tree.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise UsageError(f"{where}: '{key}' must be a list of texts, got {value!r}", hint=f'{key} = ["..."]')
    if not any(tree.get(key) for key in (*_LISTS, "fact")):
        raise UsageError(f"{where}: the pack names no source", hint=f"give at least one of {', '.join(_LISTS)}, fact")
    for key in ("title", "install"):
        if not isinstance(tree.get(key, ""), str):
            raise UsageError(f"{where}: '{key}' must be a text, got {tree[key]!r}")
    weight = _weight(tree.get("weight", 1.0), f"{where}: 'weight'")
    if not isinstance(kinds, dict):
        raise UsageError(f"{where}: 'kinds' must be a table of weights, got {kinds!r}", hint="kinds = {meaning = 2}")
    _check_keys(kinds, DRAFT_KINDS, f"{where}: kinds")
    kinds = {kind: _weight(value, f"{where}: kinds.{kind}") for kind, value in kinds.items()}
    if not isinstance(facts, list) or not all(isinstance(fact, dict) for fact in facts):
        raise UsageError(f"{where}: facts are written as tables", hint="begin each with a line: [[fact]]")
    for fact in facts:
        _check_keys(fact, _FACT_KEYS, f"{where}: fact")
        for key in _FACT_KEYS:
            if not isinstance(fact.get(key), str) or not fact[key].strip():
                raise UsageError(f"{where}: a fact needs '{key}'", hint="name the page that confirms the fact")
    texts = {key: tree[key] for key in ("title", "install") if key in tree}
    lists: dict[str, Any] = {key: tuple(tree.get(key, ())) for key in _LISTS}
    written = tuple(WrittenFact(**fact) for fact in facts)
    return Pack(
        category, **{"title": category, **texts}, where=where, weight=weight, kinds=kinds, facts=written, **lists
    )


def _check_keys(tree: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in tree:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            raise UsageError(
                f"{where}: unknown key '{key}'" + (f", did you mean '{near[0]}'?" if near else ""),
                hint=f"known: {', '.join(keys)}",
            )


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise UsageError(f"{where} must be a number from 0, got {value!r}")
    return float(value)


# What the command line names: categories that are shipped, packs of a user, folders of documents or of packages.


def find_packs(names: Sequence[str], help_of: Sequence[str]) -> tuple[list[Pack], Library]:
    """Return the packs, and where to look for their pages.

    A folder with usr/share is a place to look in, any other a pack of its own. `help_of`: commands whose help may be
    read; one that no pack names is a category of its own. All shipped packs count where no category is named. Raises
    UsageError.
    """
    shipped = {pack.category: pack for pack in shipped_packs()}
    packs_read: list[Pack] = []
    roots: list[Path] = []
    for name in names:
        path = expanded(name)
        if name in shipped:
            packs_read.append(shipped[name])
        elif (path / "usr" / "share").is_dir():
            roots.append(path)
        elif path.is_dir():
            packs_read.append(Pack(path.resolve().name, f"documents in {name}", name, documents=(str(path.resolve()),)))
        elif path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"cannot read {path}: {error}", hint="give a TOML file in UTF-8") from None
            packs_read.append(parse_pack(text, str(path)))
        else:
            near = difflib.get_close_matches(name, shipped, 1)
            hint = f"did you mean '{near[0]}'?" if near else "see the categories: hivetune data synth"
            raise UsageError(f"{name!r} is not a category, a file or a folder", hint=hint)
    others = [
        command for command in help_of if not any(command in pack.help for pack in (*packs_read, *shipped.values()))
    ]
    packs_read += [Pack(command.split()[0], f"{command} --help", "--run-help", help=(command,)) for command in others]
    packs = packs_read or list(shipped.values())
    for pack in packs:
        if sum(p.category == pack.category for p in packs) > 1:
            raise UsageError(f"two packs have the category {pack.category!r}", hint="name each once")
    return packs, Library(tuple(roots), tuple(help_of))
