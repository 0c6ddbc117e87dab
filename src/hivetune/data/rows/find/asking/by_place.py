"""What a person would try where the names of columns do not tell which is the answer: by their place and their values.

Who writes rows writes the text first and what was made of it behind it. So the texts that differ from row to row are
the question, and the answer is the last of them, or the classes and the structured columns behind them. Whoever is
shown such a line has to decide, so it is said to be a guess.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from hivetune.data.pieces.fields import as_time, plain_name
from hivetune.data.pieces.said import Row, names, parsed
from hivetune.data.rows.find.leaves import is_copied
from hivetune.data.rows.find.made import is_class, judged_together
from hivetune.data.rows.find.names import answers_somehow, is_expected, part_of, words
from hivetune.data.rows.layouts.columns import CHOICE, NUMBERED_CHOICE, looks_like_content, names_document
from hivetune.data.rows.layouts.mapped import AND, AS_JSON
from hivetune.data.rows.layouts.pairs import HALVES

_Sides = tuple[list[str], list[str]]  # columns of the question, and of the answer
_Holds = Literal["text", "short", "class", "title", "yes", "structure", "number", "constant", "note"]

LEAST_ALIKE = 3  # fewer are a document of settings, and nothing in them differs
MOST_COLUMNS = 16
MOST_TEXTS = 4
FILLED_SHARE = 0.6  # of the rows, in which a column has to have a value
VARIED_SHARE = 0.6  # of the values, that are different in a column of texts
MOST_NAME = 40  # characters of a column that anybody would paste
MANY_CLASSES = 2  # of which nobody thinks that they are notes
# Whoever writes one of these down says something about a row, and not what is to be made of its text.
_BOOKKEEPING = names(
    "account annotation annotator approved at audio author authors by checked checksum children commit "
    "confidence conversation cost count created curated dataset date dir doi edges edited embedding embeddings "
    "engine entities file filename fold folder generated guid hash host href id idx image img index ip isbn "
    "keywords lat latitude len length license line link lon longitude md5 meta metadata model modified ner no "
    "nodes notes nr num number offset page parent password path phone photo pid pmid port position price "
    "probability provider published publisher rank rating reviewed reviewer revision role row run salary secret "
    "seed session sha size slice source span split src status subset synthetic template thread time timestamp token "
    "tokens trace ts updated uri url user username uuid valid vector verified version video website weight"
)
# The same as a name of its own; `risk_level` may be what is to be learned.
_ALONE = names("level difficulty quality language lang locale state tags country region")
# In a row with one of these somebody judged a model, or a program wrote what it did.
_OF_A_RUN = names(
    "score scores reward rewards accuracy prediction predictions predicted pred judge verdict passed latency f1 bleu "
    "rouge loss epoch similarity metric metrics evaluation logger logprob duration elapsed traceback stacktrace exit "
    "rejected retrieved relevance"
)
_WHEN = names("timestamp time ts datetime date")
_LOGGED = names("level severity event type method port")  # beside a time
_NOT_OF_TABLES = (
    names("method path"),
    names("method url"),
    names("method status"),
    names("username email"),
    names("pos neg"),
    names("query pos"),
)
_FAILED = names("error errors exception traceback failure stderr")
_SPOKEN = names("user source author")  # a person, or what one wrote
_IDS = names("id uuid index idx number nr no")
_DOCUMENTS = names("text content document article passage paragraph story poem chapter body essay")  # learned whole
_ORDERS = names("prompt prompts instruction instructions")
# What a question is answered with where no column is called the answer.
_ASKED_FOR = names(
    "tool tools function functions call calls arg args argument arguments parameters action actions intent route slots "
    "label labels class command commands output outputs"
)


_TERMS = names("code term word phrase idiom slang acronym abbreviation")  # what a text explains, like a name of its own
_DERIVED = names("explanation rationale reasoning analysis justification")  # nobody begins with it

_OF_A_NAME = re.compile(r"[\d./:#]")  # an underscore alone stands in many classes
_TITLES = names("title name nombre heading header section chapter headline")  # what a text is called
_MADE = ("class", "yes", "short", "structure")
_QUESTIONS = names("q question query prompt instruction ask")  # beside one of these a class is mostly about it


def guesses_by_place(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Column maps, the likeliest first; none where such rows are no question and answer."""
    if len(rows) < LEAST_ALIKE:
        return alone(rows[0]) if rows else []
    columns = list(dict.fromkeys(name for row in rows[:LEAST_ALIKE] for name in row))
    if len(columns) > MOST_COLUMNS or _is_no_table(tuple(columns)):
        return []
    kinds = {name: _kind(name, [row.get(name) for row in rows]) for name in columns}
    whole = [name for name in columns if not _IDS & set(words(name))]
    if len(whole) == 1 and kinds[whole[0]] == "text":
        return [{"text": whole[0]}] if _DOCUMENTS & set(words(whole[0])) and part_of(whole[0]) != "asked" else []
    return [
        {"prompt": _joined(asked, kinds), "completion": _joined(answered, kinds)}
        for asked, answered in _sides(kinds)
        if not _is_named_otherwise(asked, answered, kinds) and not _says_the_same(rows, asked, answered)
    ]


def alone(row: Row) -> list[dict[str, str]]:
    """The same of a row alone, which has to hold two texts and nothing else that anybody wrote."""
    told = [name for name, value in row.items() if not _is_bookkeeping(name) and part_of(name) != "note"]
    told = [name for name in told if row[name] is not None and not is_a_number(str(row[name]) or "0")]
    prose = [name for name in told if isinstance(row[name], str) and looks_like_content(row[name])]
    found = len(prose) == 2 and not _is_no_table(tuple(row)) and (prose == told or _is_answered(prose[1]))
    found = found and not _TITLES & set(words(prose[0])[-1:])
    return [{"prompt": prose[0], "completion": prose[1]}] if found else []


def _is_named_otherwise(asked: list[str], answered: list[str], kinds: dict[str, _Holds]) -> bool:
    """Whether the names say that one of these stands on the other side, or what names alone would have decided."""
    if all(_DERIVED & set(words(name)) for name in asked):
        return True
    given = any(part_of(name) in ("asked", "given") for name in answered) and not _is_asked_to_write(asked, answered)
    if given or any(part_of(name) == "answered" for name in asked):
        return True
    if any(_FAILED & set(words(name)) for name in answered):
        return True
    named = len(asked) == len(answered) == 1 and part_of(asked[0]) == "asked" and kinds[answered[0]] == "text"
    return named and (_is_answered(answered[0]) or is_expected(answered[0]))


def _is_asked_to_write(asked: list[str], answered: list[str]) -> bool:
    """Whether a prompt stands beside a document and nothing else: with a question it would be what that is about."""
    alone = len(asked) == len(answered) == 1
    return alone and bool(_ORDERS & set(words(asked[0]))) and bool(_DOCUMENTS & set(words(answered[0])[-1:]))


def _is_no_table(columns: tuple[str, ...]) -> bool:
    """Whether rows with these columns are notes about a model or a program, half of something, or a question with its
    choices, whose answer is a letter.
    """
    said = [set(words(name)) for name in columns]
    ends = {word for name in columns for word in (*words(name)[:1], *words(name)[-1:])}
    last = {words(name)[-1] for name in columns if words(name)}
    plain = {plain_name(name) for name in columns}
    return (
        bool(_OF_A_RUN & ends)
        or bool(_FAILED & last)
        or any(pair <= set().union(*said) for pair in _NOT_OF_TABLES)
        or (bool(_LOGGED & plain) and bool(_WHEN & plain))
        or any(CHOICE.match(name) or NUMBERED_CHOICE.match(name) for name in plain)
        or not plain.isdisjoint(HALVES)
        or judged_together(columns) is not None
    )


def _sides(kinds: dict[str, _Holds]) -> list[_Sides]:
    """The likeliest sides first."""
    order = list(kinds)
    texts = [name for name in order if kinds[name] == "text"]
    if len(texts) > MOST_TEXTS:
        return []
    if not texts:
        return _of_objects(kinds)
    titles = [name for name in order[: order.index(texts[0])] if kinds[name] == "title"]
    behind = _made_of(texts, kinds)
    if len(texts) == 1:
        return _of_one_text(titles, texts[0], behind, kinds)
    several = len(behind) >= MANY_CLASSES or any(is_class(name) or is_expected(name) for name in behind)
    found = [([*titles, *texts], behind)] if several else []
    if part_of(texts[0]) == "asked":
        given = [name for name in texts[1:] if part_of(name) == "given" or plain_name(name) == "body"]
        made = [([texts[0], *given], [name]) for name in texts[1:] if name not in given]
        return [*found, *made] or [(texts[:1], texts[1:])] * _is_asked_to_write(texts[:1], texts[1:])
    given = [name for name in texts if part_of(name) == "given"]
    if texts[-1] in given and given != texts:
        return [*found, (given, [name for name in order if kinds[name] in ("short", "text") and name not in given])]
    return [*found, *_of_texts([*titles, *texts[:-1]], texts[-1], kinds), *_of_terms(texts[-1], kinds)]


def _made_of(texts: list[str], kinds: dict[str, _Holds]) -> list[str]:
    """What was made of the texts: what a question asks for, else what stands behind them, a number only beside more."""
    order = list(kinds)
    if any(_QUESTIONS & set(words(name)) for name in texts):
        return [name for name in order if kinds[name] in _MADE and _is_asked_for(name, kinds[name])]
    behind = [name for name in order[order.index(texts[-1]) + 1 :] if kinds[name] in (*_MADE, "number")]
    return behind if any(kinds[name] in _MADE for name in behind) else []


def _of_terms(last: str, kinds: dict[str, _Holds]) -> list[_Sides]:
    """The text behind a term or a code, as a glossary has them."""
    terms = [name for name in list(kinds)[:1] if kinds[name] == "short" and _TERMS & set(words(name)[-1:])]
    return [(terms, [last])] if terms else []


def _of_texts(asked: list[str], last: str, kinds: dict[str, _Holds]) -> list[_Sides]:
    """The last of several texts, which was made of those before it, or of all that stands before it; else the first one
    is given, or the last one.
    """
    order = list(kinds)
    front = [name for name in order[: order.index(last)] if kinds[name] in (*_MADE, "title", "text", "number")]
    lists = any(kinds[name] == "structure" for name in front)
    found = [(front, [last]), (asked, [last])] if lists else [(asked, [last]), (front, [last])]
    texts = [name for name in asked if kinds[name] == "text"]
    between = [name for name in order[order.index(texts[0]) + 1 : order.index(last)] if kinds[name] in _MADE]
    if between:
        found.append((texts[:1], [*between, last]))
    elif len(texts) > 1:
        found.append((texts[:1], [last]))
    elif not _is_answered(last) and part_of(last) != "asked":
        found.append(([last], texts))
    return [one for i, one in enumerate(found) if one not in found[:i]]


def _of_one_text(titles: list[str], text: str, behind: list[str], kinds: dict[str, _Holds]) -> list[_Sides]:
    """What was made of the only text stands behind it; else it was made of what stands in front of it, or the classes
    there of it.
    """
    order = list(kinds)
    front = [name for name in order[: order.index(text)] if kinds[name] in (*_MADE, "title")]
    if behind or _QUESTIONS & set(words(text)):
        return [([*titles, text], behind)] if behind else []
    is_document = part_of(text) in ("content", "given")  # with a title it is one of a library, which somebody sorted
    classes = [
        name for name in front if kinds[name] in ("class", "yes") and (not is_document or not titles or is_class(name))
    ]
    given = front != classes and front != titles[:1] and not is_document  # a title alone is that of its text
    return [*([(front, [text])] if given else []), *([([*titles, text], classes)] if classes else [])]


def _of_objects(kinds: dict[str, _Holds]) -> list[_Sides]:
    """An object that is called the question, and one that is called the answer."""
    objects = [name for name, kind in kinds.items() if kind == "structure"]
    asked = [name for name in objects if part_of(name) == "asked"]
    answered = [name for name in objects if _is_answered(name)]
    return [(asked, answered)] if len(asked) == len(answered) == 1 else []


def _joined(columns: list[str], kinds: dict[str, _Holds]) -> str:
    """The columns of one side as `--columns` takes them."""
    no_text = len(columns) == 1 and kinds[columns[0]] in ("structure", "yes")
    return f"{columns[0]}.{AS_JSON}" if no_text else AND.join(columns)


def _is_asked_for(name: str, kind: _Holds) -> bool:
    """Whether a class is what a question asks for; a list of what is expected is what a test looks for."""
    return bool(_ASKED_FOR & set(words(name))) or (is_expected(name) and kind != "structure")


def _is_answered(name: str) -> bool:
    return part_of(name) == "answered" or answers_somehow(name)


def _kind(name: str, values: list[Any]) -> _Holds:
    """What a column holds, by its name and by its values."""
    known = [parsed(value) for value in values if value not in (None, "")]
    written = plain_name(name) in _SPOKEN and all(
        isinstance(value, str) and looks_like_content(value) for value in known
    )
    if _is_bookkeeping(name) and not written:
        return "note"
    if not known or len({str(value) for value in known}) == 1:
        return "constant"
    if all(isinstance(value, list | dict) for value in known):
        return "structure" if any(map(_is_written, known)) else "note"
    if all(isinstance(value, bool) for value in known):
        return "yes"
    return _kind_of_texts(name, [str(value).strip() for value in known], len(known) >= FILLED_SHARE * len(values))


def _is_bookkeeping(name: str) -> bool:
    said = words(name)
    if plain_name(name) in _ALONE:
        return True
    unsayable = AND in name or "," in name or "=" in name or len(name) > MOST_NAME
    return unsayable or bool(_BOOKKEEPING & set(said[-1:])) or part_of(name) in ("media", "system", "tools", "thoughts")


def _kind_of_texts(name: str, texts: list[str], filled: bool) -> _Holds:
    if all(map(is_a_number, texts)):
        return "number" if filled else "note"
    if len(set(texts)) < VARIED_SHARE * len(texts):
        return "class"
    noted = 2 * sum(map(_is_note, texts)) > len(texts) and len(set(texts)) == len(texts)
    if (noted and not _TERMS & set(words(name)[-1:])) or not filled:
        return "note"
    if _TITLES & set(words(name)[-1:]) and 2 * sum(map(_asks, texts)) <= len(texts):
        return "title"
    return "text" if 2 * sum(map(_is_prose, texts)) > len(texts) else "short"


def _asks(text: str) -> bool:
    return text.endswith(("?", "\uff1f"))


def _is_prose(text: str) -> bool:
    """Whether somebody wrote this, mostly in letters: no measure and no day."""
    return looks_like_content(text) and 2 * sum(map(str.isalpha, text)) > len("".join(text.split()))


def _is_written(value: Any) -> bool:
    """Whether a list or an object holds words, and is neither numbers alone, as vectors and coordinates are, nor what
    describes a tool's arguments.
    """
    items = list(value.values()) if isinstance(value, dict) else value
    described = isinstance(value, dict) and "properties" in value
    return not described and any(isinstance(item, str | dict | list | bool) for item in items)


def is_a_number(text: str) -> bool:
    """Whether a text is a number, or what a table has in place of one: `nan`."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_note(text: str) -> bool:
    """Whether a value is a time, an address or the name of a document."""
    address = text.startswith(("http://", "https://", "www.")) or ("@" in text and " " not in text)
    return address or as_time(text) is not None or (names_document(text) and _OF_A_NAME.search(text) is not None)


def _says_the_same(rows: Sequence[Row], asked: list[str], answered: list[str]) -> bool:
    """Whether of one text and another one holds the other in most rows."""
    if len(answered) != 1:
        return False
    said = [(str(row.get(answered[0], "")), str(row.get(name, ""))) for row in rows for name in asked]
    said = [(a, b) for a, b in said if looks_like_content(a) and looks_like_content(b)]
    return 2 * sum(is_copied(a, b, "") or is_copied(b, a, "") for a, b in said) > len(rows)
