"""One manual page from its file: compressed or not, written with man(7) or mdoc(7)."""

import bz2
import gzip
import lzma
import re
import zlib
from pathlib import Path
from typing import Any

from hivetune.synth.sources.page import DocBlock, DocPage, NotUnderstood
from hivetune.synth.sources.roff import blocks_of_man, blocks_of_mdoc
from hivetune.synth.sources.structure import page_of

MAX_BYTES = 4 << 20  # the longest page here, of a compiler, has 1.5 MB
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_NAME = re.compile(r"(?P<name>.+)\.(?P<section>\d\w*|n|l)$")


def read_manual(path: Path) -> DocPage:
    """Read one page.

    Raises NotUnderstood for a file that can't be read, is too large, an alias (.so) or documents nothing.
    """
    name, section = name_of(path)
    text = read_packed(path)
    if text.lstrip().startswith(".so "):
        raise NotUnderstood("alias of another page")
    typed = re.fullmatch(r"[168]|1\w+|8\w+", section)  # these sections document what is typed
    return page_of(blocks_in(text), path, f"{name}({section})", command=name if typed else None)


def name_of(path: Path) -> tuple[str, str]:
    """Return ("systemctl", "1") for systemctl.1.gz."""
    stem = path.stem if path.suffix in _OPENERS else path.name
    match = _NAME.fullmatch(stem)
    return (match["name"], match["section"]) if match else (stem, "1")


def read_packed(path: Path) -> str:
    """Return the text of a file that may be compressed. Raises NotUnderstood."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            data: bytes = file.read(MAX_BYTES + 1)
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


def blocks_in(text: str) -> list[DocBlock]:
    """Return the blocks of a page in man(7) or mdoc(7); none of any other text."""
    if re.search(r"^\.Sh\b", text, re.MULTILINE):
        return blocks_of_mdoc(text)
    return blocks_of_man(text) if re.search(r"^['.]\s*(SH|TH)\b", text, re.MULTILINE) else []
