"""Topic packs: the 24 that come with Hivetune and those of a user, and where their pages are on this machine."""

import difflib
import fnmatch
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from importlib.resources import files
from pathlib import Path

from hivetune.base.paths import expanded
from hivetune.base.typed import from_plain
from hivetune.errors import UsageError
from hivetune.synth.documents import documents_below, module_files, read_document, read_module
from hivetune.synth.manual import name_of, read_manual
from hivetune.synth.page import DocPage

_REFERENCE = re.compile(r"(.+)\(([\w*?\[\]]+)\)")


@dataclass(frozen=True)
class WrittenFact:
    """A question with an answer that a person wrote."""

    question: str
    answer: str
    source: str  # the page that confirms it, as systemctl(1)


@dataclass(frozen=True)
class Pack:
    """A category of rows and its sources. Its fields are the keys of a pack's TOML file."""

    category: str
    title: str = ""
    install: str = ""  # the packages that bring its pages
    pages: tuple[str, ...] = ()  # of the manual
    documents: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()  # of Python
    fact: tuple[WrittenFact, ...] = ()


def shipped_packs() -> list[Pack]:
    """Return the packs that come with Hivetune, by category."""
    packs = {entry.name: entry for entry in files(__package__).iterdir() if entry.name.endswith(".toml")}
    return [parse_pack(packs[name].read_text(encoding="utf-8"), name) for name in sorted(packs)]


def parse_pack(text: str, where: str) -> Pack:
    """Read a pack. Raises UsageError that names the file and the key."""
    try:
        pack = from_plain(Pack, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not TOML: {error}", hint="see docs/synth.md for an example of a pack") from None
    except ValueError as error:
        raise UsageError(f"{where}: {error}", hint=f"known keys: {', '.join(Pack.__dataclass_fields__)}") from None
    if not (pack.pages or pack.documents or pack.modules):
        raise UsageError(f"{where}: the pack names no source", hint="give pages, documents or modules")
    return pack


@dataclass(frozen=True, slots=True)
class DocSource:
    """One page that can be read."""

    kind: str  # manual, document or module
    name: str  # how it is called
    path: Path


def read_source(source: DocSource) -> DocPage:
    """Read the page as structure. Raises NotUnderstood."""
    if source.kind == "manual":
        return read_manual(source.path)
    if source.kind == "document":
        return read_document(source.path, source.name)
    return read_module(source.name, source.path)


SHARES = (Path("/usr/local/share"), Path("/usr/share"))


class Library:
    """The places where pages are looked for."""

    @cached_property
    def manuals(self) -> dict[tuple[str, str], Path]:
        """Return (name, section) -> file. MANPATH and earlier folders win; translations are left out."""
        named = [Path(part) for part in os.environ.get("MANPATH", "").split(":") if part]
        paths: dict[tuple[str, str], Path] = {}
        for folder in (*named, *(share / "man" for share in SHARES)):
            for path in sorted(folder.glob("man*/*")):
                if re.fullmatch(r"man\w+", path.parent.name):
                    paths.setdefault(name_of(path), path)
        return paths

    def sources_of(self, pack: Pack) -> list[DocSource]:
        """Return the pages of a pack that are on this machine, each once."""
        found = [source for name in pack.pages for source in self.find_manuals(name)]
        found += [source for name in pack.documents for source in self.find_documents(name)]
        found += [DocSource("module", *module) for name in pack.modules for module in module_files(name)]
        unique = {(each.kind, each.path): each for each in reversed(found)}
        return list(reversed(unique.values()))

    def find_manuals(self, reference: str) -> Iterator[DocSource]:
        """Yield the manual pages that `reference` names: `systemctl(1)`, or with wildcards `systemd.*(5)`.

        A page that is an alias of another, or a link to it, is yielded once. Raises UsageError.
        """
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise UsageError(f"{reference!r} is not a manual page", hint="write it as name(section), for example ls(1)")
        is_pattern = re.search(r"[*?\[]", reference) is not None
        resolved: dict[Path, DocSource] = {}
        for name, section in sorted(self.manuals) if is_pattern else [(match[1], match[2])]:
            path = self.manuals.get((name, section))
            fits = not is_pattern or fnmatch.fnmatchcase(f"{name}({section})", reference)
            if path is not None and fits and path.exists():
                resolved.setdefault(path.resolve(), DocSource("manual", f"{name}({section})", path))
        yield from resolved.values()

    def find_documents(self, pattern: str) -> Iterator[DocSource]:
        """Yield the documents of a file, folder or pattern; a relative path is looked for below usr/share/doc."""
        path = expanded(pattern)
        below_doc = [text for share in SHARES for text in sorted(glob(str(share / "doc" / path)))]  # absolute: the path
        for found in [path] if path.exists() else [*map(Path, dict.fromkeys(below_doc))]:
            for file in documents_below(found) if found.is_dir() else [found]:
                below = str(file.relative_to(found.parent))
                if below.isprintable():  # no row could cite a name that is not UTF-8
                    yield DocSource("document", below, file)


def find_packs(names: Sequence[str]) -> list[Pack]:
    """Return the packs that the command line names.

    A name is a shipped category, a user's pack, or a folder of documents, which becomes a pack of its own. Without a
    name all shipped packs are used. Raises UsageError.
    """
    shipped = {pack.category: pack for pack in shipped_packs()}
    named: list[Pack] = []
    for name in names:
        path = expanded(name)
        if name in shipped:
            named.append(shipped[name])
        elif path.is_dir():
            title, folder = f"documents in {name}", path.resolve()
            named.append(Pack(documents=(str(folder),), category=folder.name, title=title))
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
    packs = named or list(shipped.values())
    for pack in packs:
        if sum(p.category == pack.category for p in packs) > 1:
            raise UsageError(f"two packs have the category {pack.category!r}", hint="name each once")
    return packs
