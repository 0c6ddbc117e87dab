"""Text is UTF-8, UTF-16 or UTF-32 with a byte order mark, or what `data.encoding` names; nothing is guessed."""

import codecs
from collections.abc import Iterable, Iterator

import chardet

from hivetune.errors import UsageError

# The longest first, since UTF-32's mark begins with UTF-16's.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Without a mark these do not say the order of their bytes; programs on PCs leave it out and write the low byte first.
BYTE_ORDERS = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}
MIN_ZERO_SHARE = 0.3  # of every second byte of UTF-16 in which anything is ASCII; JSON has quotes, braces and names
MIN_LINES = 3  # that are not UTF-8; fewer are refused as rows


def plain_name_of(encoding: str) -> str:
    """Return the one name of an encoding of texts: iso8859-1 for Latin-1 or ISO-8859-1. Raise UsageError."""
    try:
        name = codecs.lookup(encoding).name
        bytes(range(256)).decode(name, "replace")  # codecs such as base64, rot13 and idna read no texts
    except (LookupError, UnicodeError):
        raise UsageError(
            f"data.encoding: there is no encoding {encoding!r}", hint="for example cp1252, koi8-r"
        ) from None
    return name.replace("_", "-")


def marked_encoding(head: bytes) -> str | None:
    """Return the encoding that a byte order mark other than UTF-8's tells."""
    return next((name for mark, name in MARKS if head.startswith(mark)), None)


def wide_encoding(sample: bytes) -> str | None:
    """Return utf-16-le or utf-16-be by the zero bytes of a text's ASCII letters, else None."""
    even, odd = (sample[start:4096:2].count(0) / max(1, len(sample[start:4096:2])) for start in (0, 1))
    if max(even, odd) < MIN_ZERO_SHARE or min(even, odd) > 0.01:
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def likely_encoding(sample: bytes) -> str | None:
    """Return what a text seems to be in that is mostly not UTF-8, for a message; None if it is UTF-8."""
    if (wide := wide_encoding(sample)) is not None:
        return wide
    lines = [line for line in sample.split(b"\n") if not line.isascii()]
    broken = [line for line in lines if not _is_utf8(line)]
    if len(broken) < MIN_LINES or 2 * len(broken) <= len(lines):
        return None
    encoding = chardet.detect(b"\n".join(broken))["encoding"]
    return None if encoding is None else codecs.lookup(encoding).name.replace("_", "-")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"  # cut at the end of the sample
    return True


def as_utf8(blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Yield a text of another encoding as UTF-8. What is broken in it becomes U+FFFD, which the checks refuse."""
    texts = codecs.iterdecode(blocks, encoding, "replace")
    yield next(texts, "").removeprefix("\ufeff").encode("utf-8", "replace")
    for text in texts:
        yield text.encode("utf-8", "replace")
