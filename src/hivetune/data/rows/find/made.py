"""A row of two texts of which one is, by its name, made of the other: `context` and `target`, `dialogue` and `summary`;
of a text and its class: `text` and `label`, `review` and `sentiment`, a hypothesis with its premise and `label`; or of
a text in two languages.

Names decide, so that all rows of a file are read alike, whether a class is a word or a number; a row with a third text
or a second class is asked about.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from hivetune.data.pieces.fields import as_number, as_time, plain_name
from hivetune.data.pieces.said import Row, names, parsed
from hivetune.data.rows.find.languages import names_language
from hivetune.data.rows.find.leaves import at
from hivetune.data.rows.find.names import SHORTENED, is_a_models, is_expected, part_of, words
from hivetune.data.rows.find.written import Written
from hivetune.data.rows.layouts.columns import looks_like_content, names_document
from hivetune.data.rows.layouts.pairs import HALVES, LABELS

_QUERY = re.compile(r"\s*(?:SELECT|WITH|INSERT|UPDATE|DELETE|CREATE|MATCH|PREFIX)\s", re.I)
_NEXT_QUERY = re.compile(r";\s*(?:SELECT|WITH)\s", re.I)

_Kind = Literal["prompt", "document", "product", "class"]

_CLASSES = names("label labels sentiment emotion intent polarity class")  # of a text and nothing else, unlike a target
_KINDS: dict[str, _Kind] = (
    dict.fromkeys(names("context input example examples"), "prompt")  # type: ignore[assignment]
    | dict.fromkeys(
        names(
            "text content document article dialogue dialog passage conversation transcript story report email post "
            "review paragraph paper body sentence tweet comment message utterance statement query news symptom "
            "symptoms fact facts finding findings invocation nl diff"
        ),
        "document",
    )
    | dict.fromkeys(
        SHORTENED
        | names(
            "abstract completion translation sql impression impressions diagnosis disease judgment verdict charge soap"
        )
        | names("accusation crime cmd bash"),
        "product",
    )
    | dict.fromkeys(names("target truth") | _CLASSES, "class")
)
_MAKES = (
    ("prompt", "product"),
    ("prompt", "class"),
    ("document", "product"),
    ("document", "class"),
    ("product", "class"),
)
_TOPICS = names("category topic")  # of a short text alone in its row; those of a document are said about it
_SHORT_TEXTS = names("text message sentence tweet comment review post email headline statement symptom symptoms resume")
_QUALIFIERS = names(
    "note notes clinical ground full raw whole expected reference ref gold short name string clean cleaned"
)
_RIGHT = names("expected reference ref gold")  # a text that is one of these was made of another
_OF_A_TEST = names("sample samples prediction predictions pred preds")  # beside what is said to be right
_TARGETS = tuple(frozenset((name,)) for name in ("tgt", "trg", "target", "dst"))
_FLAWED = names(
    "incorrect wrong erroneous ungrammatical noisy original complex"
)  # a text of which a better one was made
_BETTER = names("correct corrected correction grammatical fixed edited revised improved rewritten simplified simple")
_WRITTEN = names("text sentence sentences paragraph passage content version code")
_TOGETHER = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence_1", "sentence_2"), ("text1", "text2")),
    *(("text_a", "text_b"), ("sentence_a", "sentence_b"), ("sent1", "sent2"), ("query1", "query2")),
    *(("question1", "question2"), ("question_1", "question_2")),
)
_SOURCE = frozenset(("src",))
_IN_PAIRS = (
    (frozenset(("meaning", "representation")), frozenset(("human", "reference"))),
    (frozenset(("mr",)), frozenset(("ref",))),
)
_CLEANED = names("clean cleaned normalized processed preprocessed")
_IN_WORDS = names("text name string description desc")
_ROUTED = names("intent") | _TOPICS
_OF_A_CALL = names("latency tokens ms cost elapsed")
_OF_A_SPAN = names("start end begin offset span")
_LANGUAGES = frozenset(("lang", "language", "languages"))


def made_of(row: Row) -> tuple[str, str] | None:
    """(the column of the text, the column of what was made of it, which may be empty in a row).

    None where the names do not say both, where one says that the other half stands elsewhere, or where another column
    holds more than a number, a label, a date, a note or the name of something.
    """
    pair = _named_or_alone(row)
    if pair is None:
        return None
    text, made = (at(row, name) for name in pair)
    if not isinstance(text, str) or not isinstance(made, str | int | float | None):
        return None
    if not is_class(pair[1]) and names_document(text):
        return None
    read = (*pair, "translation", premise_of(row))
    others = [name for name in row if name not in read and _original(name, tuple(row)) != pair[0]]
    if is_class(pair[1]):
        return pair if _are_beside_class(row, others, pair[1]) else None
    others = [name for name in others if not (is_expected(pair[1]) and _is_of_a_test(name))]
    if pair[1] == "code":
        tests = [name for name in others if "test" in words(name)]
        if not any(looks_like_content(row[name]) for name in tests):
            return None  # code may have been explained by a text too
        others = [name for name in others if name not in tests]
    return pair if all(_is_beside(name, row[name]) for name in others) else None


def _named_or_alone(row: Row) -> tuple[str, str] | None:
    """(text, what was made of it) by the names, or as the row has nothing else."""
    return _by_name(tuple(row)) or _mended(tuple(row)) or _alone(row) or _in_languages(row)


def _are_beside_class(row: Row, others: Sequence[str], column: str) -> bool:
    """Whether the other columns may stand beside a class. In a log of calls a class is what a program decided about a
    question before it was answered.
    """
    if set(words(column)) <= _ROUTED and any(_OF_A_CALL & set(words(name)) for name in others):
        return False
    return all(_is_beside_class(name, row[name]) for name in others)


def premise_of(row: Row) -> str | None:
    """The column of the text that a hypothesis is judged on, or of the first of two sentences."""
    both = judged_together(tuple(row))
    return both[0] if both else None


def judged_together(columns: tuple[str, ...]) -> tuple[str, str] | None:
    """The columns of two texts that have one class together."""
    plain = {plain_name(name): name for name in columns}
    return next(((plain[a], plain[b]) for a, b in _TOGETHER if a in plain and b in plain), None)


def _alone(row: Row) -> tuple[str, str] | None:
    """A `source` and a `target` and nothing else, of which one was written: no edge of a graph."""
    plain = {plain_name(name): name for name in row}
    if plain.keys() != {"source", "target"} or not looks_like_content(row[plain["target"]]):
        return None
    return plain["source"], plain["target"]


@lru_cache(512)
def _mended(columns: tuple[str, ...]) -> tuple[str, str] | None:
    """A text and the better one that was made of it, by their names."""
    said = {name: frozenset(words(name)) - _WRITTEN for name in columns}
    flawed = [name for name, one in said.items() if one and one <= _FLAWED]
    better = [name for name, one in said.items() if one and one <= _BETTER]
    return (flawed[0], better[0]) if len(flawed) == len(better) == 1 else None


def _is_of_a_test(name: str) -> bool:
    """Whether a column holds what a model under test said, beside what is said to be right."""
    return is_a_models(name) or bool(_OF_A_TEST & set(words(name)))


def class_column(row: Row) -> str | None:
    """The column of the class, in a row of a text and its class."""
    pair = made_of(row)
    return pair[1] if pair is not None and is_class(pair[1]) else None


def _in_languages(row: Row) -> tuple[str, str] | None:
    """The paths of the two languages in a translation, as the Hub's sets of them are written."""
    both = parsed(row.get("translation"))
    if not isinstance(both, dict) or len(both) != 2 or not all(names_language(plain_name(key)) for key in both):
        return None
    first, second = both
    return f"translation.{first}", f"translation.{second}"


def pairs_by_name(columns: Sequence[str]) -> list[tuple[str, str]]:
    """Every (text, what may have been made of it) among such columns."""
    kinds = [(name, kind) for name in columns if (kind := _kind(frozenset(words(name)))) is not None]
    products = [(name, kind) for name, kind in kinds if kind in ("product", "class")]
    return [(source, made) for source, given in kinds for made, kind in products if (given, kind) in _MAKES]


@lru_cache(512)
def _by_name(columns: tuple[str, ...]) -> tuple[str, str] | None:
    """(text, what was made of it) among such columns."""
    if any(plain_name(name) in HALVES for name in columns):
        return None
    plain = {frozenset(words(name)): name for name in columns}
    if (both := judged_together(columns)) is not None:
        verdict = [name for said, name in plain.items() if _kind(said - {"gold"}) == "class"]
        return (both[1], verdict[0]) if len(verdict) == 1 else None
    for source, target in (({"source"}, {"target"}), ({"source", "text"}, {"target", "text"})):
        if {frozenset(source), frozenset(target)} <= plain.keys():  # of two languages, or as a trainer of T5 has them
            told = len(source) > 1 or any(_LANGUAGES & said for said in plain)
            return (plain[frozenset(source)], plain[frozenset(target)]) if told else None
    if (known := _known_pair(plain)) is not None:
        return known
    spoken = [name for name in columns if names_language(plain_name(name))]
    if len(spoken) == 2 and not any(_KINDS.get(word) for said in plain if plain[said] not in spoken for word in said):
        return spoken[0], spoken[1]  # who reads from the left translates so
    pairs = pairs_by_name([name for name in columns if _original(name, columns) is None])
    named = [pair for pair in pairs if _is_named(frozenset(words(pair[1])))]  # `label_text` beside a `label` of numbers
    pairs = named if len(named) == 1 else pairs
    return pairs[0] if len(pairs) == 1 else None if pairs else _with_topic(plain)


def _known_pair(plain: dict[frozenset[str], str]) -> tuple[str, str] | None:
    """The columns of a pair that always stand together: data and what it says, a task and its code beside tests, a
    text and its translation.
    """
    pairs = [*_IN_PAIRS, *((_SOURCE, target) for target in _TARGETS)]
    if any("test" in said for said in plain):
        pairs.append((frozenset(("text",)), frozenset(("code",))))
    return next(((plain[one], plain[other]) for one, other in pairs if {one, other} <= plain.keys()), None)


def _original(name: str, columns: tuple[str, ...]) -> str | None:
    """The column of the text that this one has cleaned: `text` of `text_clean`."""
    said = frozenset(words(name))
    if not said & _CLEANED:
        return None
    return next((one for one in columns if frozenset(words(one)) == said - _CLEANED), None)


def _kind(said: frozenset[str]) -> _Kind | None:
    """What a name with these words holds; None where it does not say, or says two things."""
    if _is_named(said):
        return "class"
    if said & _RIGHT and said - _QUALIFIERS == {"text"}:
        return "product"
    kinds = {_KINDS.get(word) for word in said - _QUALIFIERS}
    return kinds.pop() if len(kinds) == 1 else None


def _is_named(said: frozenset[str]) -> bool:
    """Whether these words say that a class stands there in words."""
    return bool(said & _CLASSES) and bool(said & _IN_WORDS) and said <= _CLASSES | _IN_WORDS


def _with_topic(plain: dict[frozenset[str], str]) -> tuple[str, str] | None:
    """A short text and its category, with nothing beside them but numbers of rows."""
    texts = [name for said, name in plain.items() if said and said <= _SHORT_TEXTS]
    topics = [name for said, name in plain.items() if said and said <= _TOPICS]
    others = [
        name for said, name in plain.items() if name not in (*texts, *topics) and said - {"id", "index", "unnamed"}
    ]
    return (texts[0], topics[0]) if len(texts) == len(topics) == 1 and not others else None


def is_class(name: str) -> bool:
    """Whether a column of this name holds the class of a text."""
    said = frozenset(words(name))
    return _kind(said) == "class" or said <= _TOPICS


def _is_beside(name: str, value: Any) -> bool:
    """Whether a column may stand beside such a pair and be left out."""
    if value in (None, "", []) or _is_number(value) or name in LABELS or part_of(name) in ("note", "system"):
        return True
    return isinstance(value, str) and (names_document(value) or as_time(value) is not None)


def _is_beside_class(name: str, value: Any) -> bool:
    """The same beside a class, which may be that of the text and of what another column names: an aspect, an entity, a
    stretch of the text.
    """
    if _OF_A_SPAN & set(words(name)):
        return False
    return part_of(name) in ("note", "system") or _is_number(value) or set(words(name)) <= _TOPICS


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or the text of one as tables have it."""
    return isinstance(value, int | float) or as_number(value) is not None


def with_code(row: Row, asked: list[str], answered: list[str]) -> tuple[list[str], list[str]]:
    """(questions, answers): of two questions, one that is a query in a language of databases answers the other, also
    beside what came of it.
    """
    if len(asked) == 2 and all(is_found(path) and _is_listed(at(row, path)) for path in answered):
        if len(calls := [path for path in asked if isinstance(at(row, path), Written)]) == 1:
            return [path for path in asked if path not in calls], calls
        queries = [path for path in asked if is_query(at(row, path))]
        if len(queries) == 2:  # "Select all names" may be asked too
            queries = [path for path in queries if words(path.rpartition(".")[2]) == ("query",)]
        if len(queries) == 1 and not _NEXT_QUERY.search(at(row, queries[0])):  # else all that would be right
            return [path for path in asked if path != queries[0]], queries
    return asked, answered


def is_query(text: Any) -> bool:
    """Whether a text is a query in a language of databases."""
    return isinstance(text, str) and _QUERY.match(text) is not None


def is_found(path: str) -> bool:
    """Whether a name is one for what a query found."""
    return words(path.rpartition(".")[2]) == ("result",)


def _is_listed(value: Any) -> bool:
    return isinstance(parsed(value), list)
