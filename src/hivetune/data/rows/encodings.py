"""Text that is not UTF-8: which encoding it is in, and how it is read. What is ambiguous is refused, not guessed.

UTF-16 and UTF-32 tell themselves by their byte order mark or by the zero bytes of their ASCII letters; the encodings of
Chinese, Japanese, Korean and Russian by the signs that are frequent in these languages, over the beginning of a file.
One byte a Latin letter tells nothing: a row in such an encoding is read only where all encodings that people use for
Latin letters agree on every byte of it (ä, ö, ü, ß, é, ó and typographic quotes, but not è or ñ, which are č and ń in
Polish).
"""

import codecs
import re
from typing import Protocol

# With a mark: longest first, since UTF-32's begins with UTF-16's.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
LATIN = ("cp1250", "cp1254", "cp1257")  # of Central Europe, Turkey and the Baltic, beside cp1252 of the West
# Of languages of the West: their letters beyond ASCII, and words that no other language with such bytes has.
WESTERN = {
    "French": ("àâæçéèêëîïôœùûüÿ", "les des une est dans pour que qui avec sur vous nous pas cette sont mais votre"),
    "Spanish": ("áéíñóúü", "los las una que para por con del como este esta pero más usted puede sobre cuando"),
    "Portuguese": ("áâãàçéêíóôõú", "que para com uma dos das por mais como isso pelo pela você foi mas seu sua"),
    "Italian": ("àèéìíòóùú", "che non per una con del della sono questo come gli più nel alla anche quando puoi"),
    "German": ("äöüß", "der die und das nicht ist mit ein eine auf den von sich auch wie kann werden"),
}
# (encodings, frequent signs of a language, the least share of them among a text's signs beyond ASCII): they are 0.3 to
# 0.5 of Chinese, Japanese and Korean texts and 0.95 of Russian ones; 0.05 and 0.45 of texts in a wrong encoding.
_LANGUAGES = (
    (
        ("gb18030",),
        "，。、？！：；（）的一是不了在有人我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里",
        0.2,
    ),
    (
        ("big5",),
        "，。、？！：；（）的一是不了在有人我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡",
        0.2,
    ),
    (
        ("cp932", "euc_jp"),
        "、。のにはをたがでてとしれさあいうえおるまりすかくきけこそちつなねみもやよらわんっッーアイスルントラリ",
        0.3,
    ),
    (("cp949",), "이다는에의을가고하지로를은한사기도서어있나으그시자수해습니요까대리인정일제만아라부전", 0.2),
    (("cp1251", "koi8-r"), "оеаинтсрвлкмдпуяыьгзбчйхжшюцщ", 0.8),
)
_DOUBTFUL = 0.75  # of what makes an encoding certain
_LEAST_SIGNS = 20
LEAST_WORDS = 2  # different ones; one may be a name or a loan
WORD = re.compile(r"[^\W\d_]+")
LEAST_ZEROS = 0.3  # of the bytes of UTF-16 in which anything is ASCII; JSON has quotes, braces and names
_BLOCK_BYTES = 1 << 16


class ByteSource(Protocol):
    def read(self, size: int) -> tuple[bytes, str | None]:
        """At most `size` bytes and, at the end of what can be read, what went wrong."""


def wide_encoding(head: bytes) -> str | None:
    """utf-16-le, utf-16-be, utf-32-le or utf-32-be by the first bytes of a file, else None."""
    for mark, name in MARKS:
        if head.startswith(mark):
            return name
    if len(head) < 4:
        return None
    even, odd = head[0::2].count(0) / len(head), head[1::2].count(0) / len(head)
    if odd > LEAST_ZEROS and even < 0.01:
        return "utf-16-le"
    return "utf-16-be" if even > LEAST_ZEROS and odd < 0.01 else None


def legacy_encoding(head: bytes) -> str | None:
    """The encoding of a beginning that is no UTF-8, by the language that it then is in; None where none is clear."""
    text = head.decode("utf-8", "surrogateescape")
    broken = sum("\udc80" <= c <= "\udcff" for c in text)
    if broken < _LEAST_SIGNS or sum(not c.isascii() for c in text) > 2 * broken:
        return None  # or a few broken bytes among UTF-8
    found = sorted((_share(head, name, signs) / least, name) for names, signs, least in _LANGUAGES for name in names)
    return found[-1][1] if found[-1][0] >= 1 and found[-2][0] < _DOUBTFUL else None


def _share(head: bytes, encoding: str, frequent: str) -> float:
    """How many of the signs beyond ASCII are frequent ones; 0 where the bytes are not of the encoding."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)  # whose last sign may be cut
    except UnicodeDecodeError:
        return 0
    signs = [c for c in text if not c.isascii()]
    return sum(c in frequent for c in signs) / max(_LEAST_SIGNS // 2, len(signs))


class Transcoded:
    """A stream of another encoding as UTF-8. What is broken in it becomes U+FFFD, which the checks refuse."""

    def __init__(self, source: ByteSource, encoding: str):
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._started = False
        self._rest = b""
        self._problem: str | None = None
        self._ended = False

    def read(self, size: int) -> tuple[bytes, str | None]:
        while len(self._rest) < size and not self._ended:
            block, self._problem = self._source.read(_BLOCK_BYTES)
            self._ended = not block or self._problem is not None
            text = self._decoder.decode(block, final=self._ended)
            if text and not self._started:
                text, self._started = text.removeprefix("\ufeff"), True
            self._rest += text.encode("utf-8", "replace")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken, self._problem if self._ended and not self._rest else None


def ends_lines_with_cr(head: bytes) -> bool:
    """Whether the lines of a beginning end with carriage returns alone, as old programs of the Macintosh left them."""
    return b"\r" in head and b"\n" not in head and b"\r" in head.rstrip()


class WithLineFeeds:
    """A stream in UTF-8 with line feeds for carriage returns."""

    def __init__(self, source: ByteSource):
        self._source = source

    def read(self, size: int) -> tuple[bytes, str | None]:
        block, problem = self._source.read(size)
        return block.replace(b"\r", b"\n"), problem


def latin_text(payload: bytes) -> str | None:
    """Bytes of one Latin letter each as text, or None where encodings differ and the language does not tell, or the
    words are of another script.
    """
    try:
        text = payload.decode("cp1252")
        if _is_western(text):
            return text
        if any(payload.decode(name) != text for name in LATIN):
            return None
    except UnicodeDecodeError:
        return None
    words = (word for word in WORD.findall(text) if not word.isascii())
    return text if all(_is_latin(word) for word in words) else None


def _is_western(text: str) -> bool:
    """Whether a text is in a language of the West by its words, with no letters but those of that language."""
    lower = text.lower()
    letters = {c for c in lower if not c.isascii() and c.isalpha()}
    words = set(WORD.findall(lower))
    return any(
        letters <= set(own) and len(words & set(usual.split())) >= LEAST_WORDS for own, usual in WESTERN.values()
    )


def _is_latin(word: str) -> bool:
    """Words of Cyrillic or Greek bytes are nothing but such letters; Latin words have a few among others."""
    foreign = sum(not c.isascii() for c in word)
    return len(word) > 1 and foreign <= len(word) / 2
