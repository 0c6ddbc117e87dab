"""Topic packs: the 24 that come with Hivetune, and those of a user, with the place of every mistake."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from hivetune.base.paths import expanded
from hivetune.errors import UsageError
from hivetune.synth.places import Library, Places

_LISTS = ("pages", "documents", "modules", "help")
_KEYS = ("category", "title", "install", *_LISTS, "fact")
_FACT_KEYS = ("question", "answer", "source")


@dataclass(frozen=True, slots=True)
class WrittenFact:
    """A question that a person answered; `source`: the page that confirms it, as systemctl(1)."""

    question: str
    answer: str
    source: str


@dataclass(frozen=True, slots=True)
class Pack(Places):
    """A category: its documentation, and the packages to install for it."""

    category: str = ""
    title: str = ""
    install: str = ""
    facts: tuple[WrittenFact, ...] = ()


def shipped_packs() -> list[Pack]:
    """Return the packs that come with Hivetune, by category."""
    packs = {entry.name: entry for entry in files(__package__).iterdir() if entry.name.endswith(".toml")}
    return [parse_pack(packs[name].read_text(encoding="utf-8"), name) for name in sorted(packs)]


def parse_pack(text: str, where: str) -> Pack:
    """Read a pack. Raises UsageError that names the file, the key and the nearest known one."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not TOML: {error}", hint="see docs/synth.md for an example of a pack") from None
    _check_keys(tree, _KEYS, where)
    category, facts = tree.get("category"), tree.get("fact", [])
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
    if not isinstance(facts, list) or not all(isinstance(fact, dict) for fact in facts):
        raise UsageError(f"{where}: facts are written as tables", hint="begin each with a line: [[fact]]")
    for fact in facts:
        _check_keys(fact, _FACT_KEYS, f"{where}: fact")
        for key in _FACT_KEYS:
            if not isinstance(fact.get(key), str) or not fact[key].strip():
                raise UsageError(f"{where}: a fact needs '{key}'", hint="name the page that confirms the fact")
    lists = {key: tuple(tree.get(key, ())) for key in _LISTS}
    return Pack(
        **lists,
        category=category,
        title=tree.get("title", category),
        install=tree.get("install", ""),
        facts=tuple(WrittenFact(**fact) for fact in facts),
    )


def _check_keys(tree: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in tree:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            raise UsageError(
                f"{where}: unknown key '{key}'" + (f", did you mean '{near[0]}'?" if near else ""),
                hint=f"known: {', '.join(keys)}",
            )


def find_packs(names: Sequence[str], help_of: Sequence[str]) -> tuple[list[Pack], Library]:
    """Return the packs that the command line names, and where to look for their pages.

    A category that is shipped, a user's pack, a folder of documents (a pack of its own), or a folder with usr/share (a
    place to look in). `help_of`: commands whose help may be read; one that no pack names is a category of its own.
    Without a category all shipped packs count. Raises UsageError.
    """
    shipped = {pack.category: pack for pack in shipped_packs()}
    named: list[Pack] = []
    roots = []
    for name in names:
        path = expanded(name)
        if name in shipped:
            named.append(shipped[name])
        elif (path / "usr" / "share").is_dir():
            roots.append(path)
        elif path.is_dir():
            title = f"documents in {name}"
            named.append(Pack(documents=(str(path.resolve()),), category=path.resolve().name, title=title))
        elif path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"cannot read {path}: {error}", hint="give a TOML file in UTF-8") from None
            named.append(parse_pack(text, str(path)))
        else:
            near = difflib.get_close_matches(name, shipped, 1)
            hint = f"did you mean '{near[0]}'?" if near else "see the categories: hivetune synth"
            raise UsageError(f"{name!r} is not a category, a file or a folder", hint=hint)
    others = [c for c in help_of if not any(c in pack.help for pack in (*named, *shipped.values()))]
    named += [Pack(help=(c,), category=c.split()[0], title=f"{c} --help") for c in others]
    packs = named or list(shipped.values())
    for pack in packs:
        if sum(p.category == pack.category for p in packs) > 1:
            raise UsageError(f"two packs have the category {pack.category!r}", hint="name each once")
    return packs, Library(tuple(roots), tuple(help_of))
