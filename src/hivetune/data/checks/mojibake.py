"""Text that was UTF-8 and was read as Windows-1252: Ã© for é. Told apart from capitals in front of a closing quote.

`CAFÉ”` and `SÃO»` are correct text whose bytes also happen to be UTF-8. What gives wrong text away is a sign that no
language puts there: a letter in the middle of a word followed by a currency sign, a fraction, a raised dot.
"""

import re

# Typographic characters that Windows-1252 puts at 0x80 to 0x9F: with the Latin-1 range, what UTF-8 bytes become when
# they are read as Windows-1252.
CP1252 = "€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
# First bytes of two, for Latin, Greek, Cyrillic, Hebrew, Arabic; of three; of four. Those of rare letters (É, È, Ç as
# first bytes stand for phonetic signs) are left out.
PIECE = re.compile(
    f"[ÂÃÄÅÆÎÏÐÑ×ØÙÚÛ][\u0080-\u00bf{CP1252}]|[à-ï][\u0080-\u00bf{CP1252}]{{2}}|[ð-ô][\u0080-\u00bf{CP1252}]{{3}}"
)
# What stands behind the last letter of a word in correct text.
CLOSING = frozenset("”’“‘…–—»«›‹\u00a0")


def mojibake(text: str) -> str | None:
    """The first piece of `text` that is UTF-8 read as Windows-1252, else None."""
    for match in PIECE.finditer(text):
        if repaired(match.group()) is not None and not _natural(text, match.start(), match.end()):
            return match.group()
    return None


def repaired_words(text: str) -> list[str]:
    """The words of `text` with wrongly decoded pieces, each rightly decoded."""
    broken = [word for word in re.split(r"[ \t\r\n]+", text) if mojibake(word) is not None]
    return [PIECE.sub(lambda match: repaired(match.group()) or match.group(), word) for word in broken]


def repaired(piece: str) -> str | None:
    """The character that these were, or None. Latin-1 stands in for the bytes that Windows-1252 leaves undefined."""
    raw = b"".join(c.encode("cp1252") if c in CP1252 else c.encode("latin-1", "replace") for c in piece)
    try:
        decoded = raw.decode()
    except UnicodeDecodeError:
        return None
    return decoded if len(decoded) == 1 and (decoded.isprintable() or decoded.isspace()) else None


def _natural(text: str, start: int, end: int) -> bool:
    """Whether this is how a word ends: a letter and closing punctuation, and no word goes on behind a quote."""
    if not CLOSING.issuperset(text[start + 1 : end]):
        return False
    before, after = text[start - 1 : start], text[end : end + 1]
    if end - start > 2:
        return not after.isalpha()
    if text[start + 1] in "\u00a0—«»":  # these stand between words or alone: Ã\u00a0 is à, and Â« is «
        return before.isupper()
    return not before.islower() and not after.isalpha()
