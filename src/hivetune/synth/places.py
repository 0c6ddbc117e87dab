"""Where a pack's documentation is on this machine: manual pages by name, documents, modules, help texts."""

import fnmatch
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hivetune.base.paths import expanded
from hivetune.errors import UsageError
from hivetune.synth.docstrings import module_files, read_module
from hivetune.synth.documents import documents_below, read_document
from hivetune.synth.manual import help_page, name_of, read_manual, run_help
from hivetune.synth.page import DocPage

_SHARES = (Path("/usr/local/share"), Path("/usr/share"))
_SECTION_FOLDER = re.compile(r"man\w+")
_REFERENCE = re.compile(r"(?P<name>.+)\((?P<section>[\w*?\[\]]+)\)")


@dataclass(frozen=True, slots=True)
class DocSource:
    """One page that can be read: kind and place. `name` is what it is called: a module, a command, a reference."""

    kind: str  # manual, document, module, help
    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Places:
    """What a category is documented in: manual pages, documents, Python modules, and commands that have --help."""

    pages: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    help: tuple[str, ...] = ()


@dataclass(frozen=True)
class Library:
    """The places of pages. `roots`: folders with installed packages, like / (usr/share/man, usr/share/doc).

    `help_of`: commands that the user named; no other is run.
    """

    roots: tuple[Path, ...] = ()
    help_of: tuple[str, ...] = ()

    @cached_property
    def shares(self) -> tuple[Path, ...]:
        below_roots = (root / "usr" / "share" for root in self.roots)
        return tuple(path for path in (*below_roots, *_SHARES) if path.is_dir())

    @cached_property
    def manuals(self) -> dict[tuple[str, str], Path]:
        """Return (name, section) -> file. MANPATH and earlier folders win; translations are left out."""
        named = [Path(part) for part in os.environ.get("MANPATH", "").split(":") if part]
        folders = (*named, *(share / "man" for share in self.shares))
        files: dict[tuple[str, str], Path] = {}
        for folder in folders:
            for below in sorted(folder.glob("man*")) if folder.is_dir() else ():
                if _SECTION_FOLDER.fullmatch(below.name) and below.is_dir():
                    for path in sorted(below.iterdir()):
                        files.setdefault(name_of(path), path)
        return files

    def sources_of(self, places: Places) -> list[DocSource]:
        """Return the pages that are on this machine, each once."""
        by_path: dict[tuple[str, Path, str], DocSource] = {}
        for names, find in (
            (places.pages, self.find_manuals),
            (places.documents, self.find_documents),
            (places.modules, self.find_modules),
            (places.help, self.find_help),
        ):
            for name in names:
                for source in find(name):
                    by_path.setdefault((source.kind, source.path, source.name if source.kind == "help" else ""), source)
        return list(by_path.values())

    def find_manuals(self, reference: str) -> Iterator[DocSource]:
        """Find `systemctl(1)`, or with wildcards `systemd.*(5)`.

        A page that is an alias or link of another comes once.
        """
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise UsageError(f"{reference!r} is not a manual page", hint="write it as name(section), for example ls(1)")
        exact = match["name"], match["section"]
        resolved: set[Path] = set()
        for name, section in [exact] if not re.search(r"[*?\[]", reference) else sorted(self.manuals):
            path = self.manuals.get((name, section))
            matches = fnmatch.fnmatchcase(name, exact[0]) and fnmatch.fnmatchcase(section, exact[1])
            if path is not None and (matches or (name, section) == exact):
                real = path.resolve()
                if real not in resolved and real.exists():
                    resolved.add(real)
                    yield DocSource("manual", f"{name}({section})", path)

    def find_documents(self, pattern: str) -> Iterator[DocSource]:
        """Find a folder or file; a relative one is looked for below usr/share/doc. It may have wildcards.

        A file whose name is not UTF-8 is left out: no row could cite it.
        """
        path = expanded(pattern)
        if path.is_absolute() or path.exists():
            paths = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        else:
            paths = [match for share in self.shares for match in sorted((share / "doc").glob(pattern))]
        for path_found in paths:
            for file in documents_below(path_found) if path_found.is_dir() else [path_found]:
                below = str(file.relative_to(path_found.parent)) if path_found.is_dir() else file.name
                if below.isprintable():
                    yield DocSource("document", below, file)

    def find_modules(self, name: str) -> Iterator[DocSource]:
        for module, path in module_files(name):
            yield DocSource("module", module, path)

    def find_help(self, command: str) -> Iterator[DocSource]:
        """Find a command for its help. Only what the user named with --run-help is run."""
        if command.split()[0] in self.help_of or command in self.help_of:
            program = shutil.which(command.split()[0])
            if program is not None:
                yield DocSource("help", command, Path(program))


def read_source(source: DocSource) -> DocPage:
    """Read the page as structure. Raises NotUnderstood."""
    if source.kind == "manual":
        return read_manual(source.path)
    if source.kind == "document":
        return read_document(source.path, source.name)
    if source.kind == "module":
        return read_module(source.name, source.path)
    return help_page(source.name, run_help(source.name.split()), source.path)
