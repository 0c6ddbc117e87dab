"""Text that is not UTF-8: which encoding it is in, and how it is read. What is ambiguous is refused, not guessed.

UTF-16 and UTF-32 tell themselves by their byte order mark or by the zero bytes of their ASCII letters. Any other file
is told by chardet (docs/decisions/0093).
"""

import codecs
import re
from collections.abc import Iterable, Iterator

import chardet

from hivetune.errors import UsageError

# With a mark: longest first, since UTF-32's begins with UTF-16's.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Without a mark these do not say the order of their bytes; programs on PCs leave it out and write the low byte first.
BYTE_ORDERS = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}
# Encodings that people still save texts in; others win where a file has few letters beyond ASCII.
LATIN_AND_WIDE = (
    *("cp1252", "cp1250", "iso8859-2", "cp1254", "cp1257", "cp1258"),
    *("cp932", "euc-jp", "cp949", "gb18030", "big5"),
)
OTHER_SCRIPTS = ("cp1251", "koi8-r", "cp1253", "cp1255", "cp1256", "cp874")  # Cyrillic, Greek, Hebrew, Arabic, Thai
_MIXED_SHARE = 0.2  # of the words beyond ASCII; hardly any Cyrillic word holds a Latin letter, most French ones do
_MIN_SIGNS = 20  # bytes beyond ASCII; with fewer, one text in twenty is taken for another encoding
_BYTE_WORD, _ASCII_LETTER = re.compile(rb"[A-Za-z\x80-\xff]+"), re.compile(rb"[A-Za-z]")
MIN_ZERO_SHARE = 0.3  # of the bytes of UTF-16 in which anything is ASCII; JSON has quotes, braces and names


def plain_name_of(encoding: str) -> str:
    """Return the one name of an encoding of texts, under which a format holds it: iso8859-1 for Latin-1 or ISO-8859-1.

    Raise UsageError.
    """
    try:
        name = codecs.lookup(encoding).name
        bytes(range(256)).decode(name, "replace")  # codecs such as base64, rot13 and idna read no texts
    except (LookupError, UnicodeError):
        raise UsageError(
            f"data.encoding: there is no encoding {encoding!r}", hint="for example cp1252, koi8-r"
        ) from None
    return name.replace("_", "-")


def wide_encoding(head: bytes) -> str | None:
    """Return utf-16-le, utf-16-be, utf-32-le or utf-32-be by the first bytes of a file, else None."""
    for mark, name in MARKS:
        if head.startswith(mark):
            return name
    if len(head) < 4:
        return None
    even, odd = head[0::2].count(0) / len(head), head[1::2].count(0) / len(head)
    if odd > MIN_ZERO_SHARE and even < 0.01:
        return "utf-16-le"
    return "utf-16-be" if even > MIN_ZERO_SHARE and odd < 0.01 else None


def legacy_encoding(head: bytes) -> str | None:
    """Return the encoding of a text whose lines beyond ASCII are mostly not UTF-8. None if it is UTF-8, or too short to
    decide.
    """
    lines = [line for line in head.split(b"\n") if not line.isascii()]
    text = b"\n".join(line for line in lines if not _is_utf8(line))
    read = text.decode("utf-8", "surrogateescape")
    broken = sum("\udc80" <= c <= "\udcff" for c in read)
    if broken < _MIN_SIGNS or sum(not c.isascii() for c in read) > 2 * broken:
        return None  # or a few broken bytes among UTF-8
    words = [word for word in _BYTE_WORD.findall(text) if not word.isascii()]
    mixed = sum(_ASCII_LETTER.search(word) is not None for word in words)
    candidates = LATIN_AND_WIDE if mixed >= _MIXED_SHARE * len(words) else (*LATIN_AND_WIDE, *OTHER_SCRIPTS)
    encoding = chardet.detect(text, include_encodings=candidates)["encoding"]
    return None if encoding is None else codecs.lookup(encoding).name.replace("_", "-")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"  # cut at the end of what was read
    return True


def as_utf8(blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Yield a text of another encoding as UTF-8. What is broken in it becomes U+FFFD, which the checks refuse."""
    texts = codecs.iterdecode(blocks, encoding, "replace")
    yield next(texts, "").removeprefix("\ufeff").encode("utf-8", "replace")
    for text in texts:
        yield text.encode("utf-8", "replace")
