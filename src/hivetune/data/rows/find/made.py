"""A row of two texts of which one is, by its name, made of the other: `context` and `target`, `dialogue` and `summary`.

Names decide, so that all rows of a file are read alike; a row with a third text is asked about.
"""

from typing import Any, Literal

from hivetune.data.rows.fields import as_time, plain_name
from hivetune.data.rows.find.names import SHORTENED, part_of, words
from hivetune.data.rows.layouts.columns import names_document
from hivetune.data.rows.layouts.pairs import HALVES, LABELS
from hivetune.data.rows.layouts.said import Row, names

_Kind = Literal["prompt", "document", "product", "class"]

_KINDS: dict[str, _Kind] = (
    dict.fromkeys(names("context input example examples"), "prompt")  # type: ignore[assignment]
    | dict.fromkeys(
        names(
            "text content document article dialogue dialog passage conversation transcript story report email post "
            "review paragraph paper body"
        ),
        "document",
    )
    | dict.fromkeys(SHORTENED | names("abstract completion translation sql"), "product")
    | dict.fromkeys(names("target truth"), "class")  # of a document they may be its class; a prompt they answer
)
_MAKES = (("prompt", "product"), ("prompt", "class"), ("document", "product"))
_QUALIFIERS = names("ground full raw whole expected reference gold short")
_LANGUAGES = frozenset(("lang", "language", "languages"))


def made_of(row: Row) -> tuple[str, str] | None:
    """(the column of the text, the column of what was made of it, which may be empty in a row).

    None where the names do not say both, where one says that the other half stands elsewhere, or where another column
    holds more than a number, a label, a date, a note or the name of something.
    """
    pair = _by_name(row)
    if pair is None or any(plain_name(name) in HALVES for name in row):
        return None
    text, made = (row[name] for name in pair)
    if not isinstance(text, str) or not isinstance(made, str | None) or names_document(text):
        return None
    return pair if all(_is_beside(name, row[name]) for name in row if name not in pair) else None


def _by_name(row: Row) -> tuple[str, str] | None:
    plain = {frozenset(words(name)): name for name in row}
    for source, target in (({"source"}, {"target"}), ({"source", "text"}, {"target", "text"})):
        if {frozenset(source), frozenset(target)} <= plain.keys():  # of two languages, or as a trainer of T5 has them
            named = len(source) > 1 or any(_LANGUAGES & said for said in plain)
            return (plain[frozenset(source)], plain[frozenset(target)]) if named else None
    if {"text", "label_text"} <= row.keys():
        return "text", "label_text"
    said_by = {name: said - _QUALIFIERS for said, name in plain.items()}
    kinds = {name: _KINDS.get(next(iter(said))) for name, said in said_by.items() if len(said) == 1}
    pairs = [
        (source, made)
        for source, given in kinds.items()
        for made, kind in kinds.items()
        if (given, kind) in _MAKES and source != made
    ]
    return pairs[0] if len(pairs) == 1 else None


def _is_beside(name: str, value: Any) -> bool:
    """Whether a column may stand beside such a pair and be left out."""
    if value is None or value in ("", []) or isinstance(value, int | float):
        return True
    if name in LABELS or part_of(name) in ("note", "system"):
        return True
    return isinstance(value, str) and (names_document(value) or as_time(value) is not None)
