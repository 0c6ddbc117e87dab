"""One manual page from its file: compressed or not, written with man(7) or mdoc(7), or rendered already."""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from hivetune.synth.sources.page import DocBlock, DocPage, NotUnderstood
from hivetune.synth.sources.rendered import blocks_of_rendered
from hivetune.synth.sources.roff import blocks_of_man, blocks_of_mdoc
from hivetune.synth.sources.structure import is_command_section, page_of

MAX_BYTES = 4 << 20  # the longest page here, of a compiler, has 1.5 MB
_PACKED = (".gz", ".bz2", ".xz")
_NAME = re.compile(r"(?P<name>.+)\.(?P<section>\d\w*|n|l)$")


def read_manual(path: Path) -> DocPage:
    """Read one page. Raises NotUnderstood for a file that can't be read, is too large, an alias (.so) or documents
    nothing.
    """
    name, section = name_of(path)
    text = read_packed(path)
    if text.lstrip().startswith(".so "):
        raise NotUnderstood("alias of another page")
    return page_of(blocks_in(text), path, f"{name}({section})", command=_command(name, section))


def name_of(path: Path) -> tuple[str, str]:
    """Return ("systemctl", "1") for systemctl.1.gz; a rendered page may end in .txt."""
    stem = path.name
    for suffix in (*_PACKED, ".txt", ".cat"):
        stem = stem.removesuffix(suffix)
    found = _NAME.fullmatch(stem)
    return (found["name"], found["section"]) if found else (stem, "1")


def read_packed(path: Path) -> str:
    """Return the text of a file that may be compressed. Raises NotUnderstood."""
    try:
        with _opened(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise NotUnderstood(f"can't be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise NotUnderstood(f"larger than {MAX_BYTES >> 20} MiB")
    if b"\0" in data[:4096]:
        raise NotUnderstood("not text")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix == ".bz2":
        return bz2.open(path, "rb")
    return lzma.open(path, "rb") if path.suffix == ".xz" else open(path, "rb")


def blocks_in(text: str) -> Sequence[DocBlock]:
    """Return the blocks of a page in any of the three forms."""
    if re.search(r"^\.Sh\b", text, re.MULTILINE):
        return blocks_of_mdoc(text)
    if re.search(r"^['.]\s*(SH|TH)\b", text, re.MULTILINE):
        return blocks_of_man(text)
    return blocks_of_rendered(text)


def _command(name: str, section: str) -> str | None:
    """The name of a page that documents something to type."""
    if not is_command_section(section):
        return None
    return name
