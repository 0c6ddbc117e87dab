"""Where a pack's documentation is on this machine: manual pages by name, documents, modules, help texts."""

import contextlib
import fnmatch
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

from hivetune.errors import UsageError
from hivetune.synth.sources.completions import read_completion
from hivetune.synth.sources.docstrings import module_files, read_module
from hivetune.synth.sources.manual import name_of, read_manual, read_packed
from hivetune.synth.sources.markup import documents_below, read_document
from hivetune.synth.sources.page import DocPage, NotUnderstood
from hivetune.synth.sources.rendered import blocks_of_rendered, help_page
from hivetune.synth.sources.structure import page_of

_SHARES = (Path("/usr/local/share"), Path("/usr/share"))
HELP_TIMEOUT_S = 20.0
MAX_HELP_BYTES = 1 << 20
MAX_WRITTEN_BYTES = 16 << 20  # in one file, what it prints included
_SECTION_FOLDER = re.compile(r"man\w+")
_REFERENCE = re.compile(r"(?P<name>.+)\((?P<section>[\w*?\[\]]+)\)")
_COMPLETION_FOLDERS = ("fish/vendor_completions.d", "fish/completions", "zsh/vendor-completions", "zsh/site-functions")


@dataclass(frozen=True, slots=True)
class DocSource:
    """One page that can be read: kind and place. `name` is what it is called: a module, a command, a reference."""

    kind: str  # manual, document, module, help, completion, info
    name: str
    path: Path


@dataclass(frozen=True)
class Places:
    """Where to look. `roots`: folders that hold what packages install below / (usr/share/man, usr/share/doc).

    `help_of`: commands that the user named; no other is run.
    """

    roots: tuple[Path, ...] = ()
    help_of: tuple[str, ...] = ()

    @cached_property
    def shares(self) -> tuple[Path, ...]:
        found = (root / "usr" / "share" for root in self.roots)
        return tuple(path for path in (*found, *_SHARES) if path.is_dir())

    @cached_property
    def manuals(self) -> dict[tuple[str, str], Path]:
        """Return (name, section) -> file. MANPATH and earlier folders win; translations are left out."""
        named = [Path(part) for part in os.environ.get("MANPATH", "").split(":") if part]
        folders = (*named, *(share / "man" for share in self.shares))
        found: dict[tuple[str, str], Path] = {}
        for folder in folders:
            for below in sorted(folder.glob("man*")) if folder.is_dir() else ():
                if _SECTION_FOLDER.fullmatch(below.name) and below.is_dir():
                    for path in sorted(below.iterdir()):
                        found.setdefault(name_of(path), path)
        return found

    def find_manuals(self, reference: str) -> Iterator[DocSource]:
        """Find `systemctl(1)`, or with wildcards `systemd.*(5)`.

        A page that is an alias or link of another comes once.
        """
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise UsageError(f"{reference!r} is not a manual page", hint="write it as name(section), for example ls(1)")
        wanted = match["name"], match["section"]
        seen: set[Path] = set()
        names = [wanted] if not re.search(r"[*?\[]", reference) else sorted(self.manuals)
        for name, section in names:
            path = self.manuals.get((name, section))
            matches = fnmatch.fnmatchcase(name, wanted[0]) and fnmatch.fnmatchcase(section, wanted[1])
            if path is not None and (matches or (name, section) == wanted):
                real = path.resolve()
                if real not in seen and real.exists():
                    seen.add(real)
                    yield DocSource("manual", f"{name}({section})", path)

    def find_documents(self, pattern: str) -> Iterator[DocSource]:
        """Find a folder or file; a relative one is looked for below usr/share/doc. It may have wildcards.

        A file whose name is not UTF-8 is left out: no row could cite it.
        """
        path = Path(pattern).expanduser()
        if path.is_absolute() or path.exists():
            found = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        else:
            found = [match for share in self.shares for match in sorted((share / "doc").glob(pattern))]
        for place in found:
            for file in documents_below(place) if place.is_dir() else [place]:
                below = str(file.relative_to(place.parent)) if place.is_dir() else file.name
                if below.isprintable():
                    yield DocSource("document", below, file)

    def find_modules(self, name: str) -> Iterator[DocSource]:
        for module, path in module_files(name):
            yield DocSource("module", module, path)

    def find_info(self, name: str) -> Iterator[DocSource]:
        """Find the files of an info manual: name.info, name.info-1 and so on."""
        for share in self.shares:
            found = sorted((share / "info").glob(f"{name}.info*"))
            yield from (DocSource("info", name, path) for path in found)
            if found:
                return

    def find_completions(self, command: str) -> Iterator[DocSource]:
        for share in self.shares:
            for folder in _COMPLETION_FOLDERS:
                for name in (f"{command}.fish", f"_{command}"):
                    path = share / folder / name
                    if path.is_file():
                        yield DocSource("completion", command, path)
                        return

    def find_help(self, command: str) -> Iterator[DocSource]:
        """Find a command for its help. Only what the user named with --run-help is run."""
        if command.split()[0] in self.help_of or command in self.help_of:
            found = shutil.which(command.split()[0])
            if found is not None:
                yield DocSource("help", command, Path(found))


def read_source(source: DocSource) -> DocPage:
    """Read the page as structure. Raises NotUnderstood."""
    if source.kind == "manual":
        return read_manual(source.path)
    if source.kind == "document":
        return read_document(source.path, source.name)
    if source.kind == "module":
        return read_module(source.name, source.path)
    if source.kind == "completion":
        return read_completion(source.path, source.name)
    if source.kind == "info":
        return _read_info(source)
    return help_page(source.name, _help_of(source.name.split()), source.path)


def _help_of(command: Sequence[str]) -> str:
    """Return what a command prints for --help; some print it to standard error, some end with 1.

    Nothing else is ever run, and nothing of it is left running. Files take what it prints, since a pipe would wait for
    all that it has started.
    """
    asked = f"{' '.join(command)} --help"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                [*command, "--help"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, "PAGER": "cat", "MANPAGER": "cat", "COLUMNS": "200", "TERM": "dumb"},
                start_new_session=True,
                preexec_fn=_write_little,
            )
        except OSError as error:
            raise NotUnderstood(f"its help can't be read: {asked}: {error}") from None
        try:
            process.wait(HELP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NotUnderstood(f"its help did not end in {HELP_TIMEOUT_S:.0f} s: {asked}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed = _beginning(out) or _beginning(err)
    if len(printed) > MAX_HELP_BYTES:  # a part would end within what one option does
        raise NotUnderstood(f"its help prints more than {MAX_HELP_BYTES >> 10} KiB: {asked}")
    return printed.decode("utf-8", "replace")


def _write_little() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_WRITTEN_BYTES, MAX_WRITTEN_BYTES))


def _beginning(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MAX_HELP_BYTES + 1)


def _read_info(source: DocSource) -> DocPage:
    """Read an info manual: its nodes have underlined headings and are laid out as rendered pages are."""
    text = read_packed(source.path)
    if "\x1f" not in text:
        raise NotUnderstood("not an info file")
    lines: list[str] = []
    for node in text.split("\x1f")[1:]:
        body = node.lstrip("\n").splitlines()
        if not body or not body[0].startswith("File:"):
            continue
        rows = body[1:]
        for at, row in enumerate(rows):
            if at and re.fullmatch(r"[*=\-.]{3,}", row) and len(row) >= len(rows[at - 1]) > 0:
                lines[-1] = re.sub(r"^[\d.]+ ", "", lines[-1])
                lines.append("")
            else:
                lines.append(f"       {row}" if row and not _is_title(rows, at) else row)
    return page_of(blocks_of_rendered("\n".join(lines)), source.path, f"info {source.name}", command=None)


def _is_title(rows: Sequence[str], at: int) -> bool:
    return at + 1 < len(rows) and re.fullmatch(r"[*=\-.]{3,}", rows[at + 1]) is not None
