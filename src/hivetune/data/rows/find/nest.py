"""Records that hold many rows: where in them the rows are, decided once for a file on a sample of its records.

A row below a record takes along what the record says beside it, so that nothing written there is left out unseen.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hivetune.data.pieces.calls import call_in_columns
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Conversation, names, objects, parsed
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.choices import first_number, with_letter
from hivetune.data.rows.containers import may_hold_rows, rows_inside
from hivetune.data.rows.find.conversation import NOT_KNOWN, read_conversation
from hivetune.data.rows.find.intents import are_all_texts, phrased, phrasings
from hivetune.data.rows.find.names import is_a_question, is_note, part_of, words
from hivetune.data.rows.find.talk.text_lists import asked_pairs
from hivetune.data.rows.find.talk.turn_lists import TALK, as_turns
from hivetune.data.rows.layouts.columns import looks_like_content
from hivetune.data.rows.layouts.mapped import map_columns, maps_content

RowPlace = tuple[str, ...]  # keys; EACH: every item of a list, or every value of an object whose values are alike
EACH = "[]"
BY_COLUMNS = "{columns}"  # a record that is a table: a list for each column
BY_QUESTIONS = "{questions}"  # a record whose names are questions and whose values are the answers
FROM = {"{choices from 0}": 0, "{choices from 1}": 1}  # behind a place: the answers of its rows are numbers of choices
BY_PHRASINGS = "{phrasings}"  # an object with several ways to ask one thing, as sets of intents have them
BY_LISTS = "{lists}"  # an object with a list of questions and one of their answers, each with its own
OWN_TEXT = "{own text}"  # in front of a place: what each record says at length of itself was given with its rows
MAX_PLACE_DEPTH = 5
MAX_PLACES = 40
MAX_TRIED_ROWS = 30  # tried at one place
MAX_BESIDE = 3  # items of a table that go along with each of many rows: enough to say what it is
MAX_CONTENT_BESIDE = 1000  # of a table of written texts beside many rows: nobody asks each of them about all of it
USABLE_SHARE = 0.5
LONG_TEXT = 200  # characters; a shorter description says what kind of rows a record holds
MIN_ALIKE = 2
_NONE: Mapping[str, str] = {}
MIN_QUESTIONS = 4
_OF_A_FILE = names("description comment comments notes purpose readme disclaimer warning citation usage about")


def place_of_rows(records: Sequence[Any], columns: Mapping[str, str] = _NONE) -> RowPlace:
    """Where the rows of such records are, read with the columns that the user named; empty when the records are rows,
    or when no place is better.
    """
    records = [record for record in map(parsed, records) if record is not None]
    if not records or sum(_is_row(record, columns) for record in records) >= USABLE_SHARE * len(records):
        return ()
    if all(is_table(record) for record in records):
        return (BY_COLUMNS,) if _share(rows_at(records, (BY_COLUMNS,)), columns) >= USABLE_SHARE else ()
    if len(records) == 1 and _are_questions(records[0]):
        return (BY_QUESTIONS,)
    best: tuple[float, RowPlace] = (0.0, ())
    for place in places(records):
        share = _share(rows_at(records, place), columns)
        if share >= USABLE_SHARE and share > best[0] and not _stands_beside(records, place, columns):
            best = (share, place)
    return _with_own_text(records, best[1])


def _with_own_text(records: Sequence[Any], place: RowPlace) -> RowPlace:
    """The place, with OWN_TEXT where most records have a description of their own, as a patient's case is one."""
    told = [text for record in records if place and (text := _own_text(record))]
    own = len(told) >= MIN_ALIKE and len(set(told)) == len(told) > USABLE_SHARE * len(records)
    return (OWN_TEXT, *place) if own else place


def _own_text(record: Any) -> str:
    """The description of a record that says more than what kind of rows it holds; notes are a reader's."""
    told = record.get("description") if isinstance(record, dict) else None
    return told if isinstance(told, str) and len(told) >= LONG_TEXT else ""


def with_choices(records: Sequence[Any], place: RowPlace, columns: Mapping[str, str] = _NONE) -> RowPlace:
    """The place of rows that nothing reads as their answers are numbers of choices, with what the first one counts as;
    else the place as it is.
    """
    rows = rows_at(records, place)
    first = first_number(rows) if rows and _share(rows, columns) < USABLE_SHARE else None
    for mark, number in FROM.items():
        if number == first and _share(rows_at(records, (*place, mark)), columns) >= USABLE_SHARE:
            return (*place, mark)
    return place


def split_record(record: Any, place: RowPlace) -> list[dict[str, Any]]:
    """The rows of one record; the record itself where it has none at that place."""
    if place[-1:] and place[-1] in FROM:
        return [with_letter(row, FROM[place[-1]]) for row in split_record(record, place[:-1])]
    value = parsed(record)
    rows = [{**beside, **row} for beside, row in _below(value, place, {})]
    return rows or ([value] if isinstance(value, dict) else [])


def split_payload(payload: bytes, place: RowPlace) -> list[bytes] | None:
    """The rows of a record as text, or of each that it holds; None when it is no JSON or holds none."""
    records = rows_inside(payload) if may_hold_rows(payload) else None
    try:
        rows = [row for record in records or [payload] for row in split_record(json.loads(record), place)]
    except (ValueError, RecursionError):
        return None
    return [json.dumps(row).encode() for row in rows] or None


def place_name(place: RowPlace) -> str:
    """As people write it: `data[].qas[]`."""
    return "".join(key if key == EACH else f".{key}" for key in place if key not in (OWN_TEXT, *FROM)).removeprefix(".")


def rows_at(records: Sequence[Any], place: RowPlace) -> list[dict[str, Any]]:
    """The first rows that such records hold at a place."""
    rows: list[dict[str, Any]] = []
    for record in records:
        rows += split_record(record, place)[:MAX_TRIED_ROWS]
        if len(rows) >= MAX_TRIED_ROWS:
            break
    return rows[:MAX_TRIED_ROWS]


def _share(rows: Sequence[Any], columns: Mapping[str, str]) -> float:
    """How many of these rows are read; a conversation that nobody began tells nothing."""
    rows = [row for row in rows if not (isinstance(row, dict) and row.get("messages") == [])]
    return sum(_is_read(row, columns) for row in rows) / max(1, len(rows))


def _stands_beside(records: Sequence[Any], place: RowPlace, columns: Mapping[str, str]) -> bool:
    """Whether the conversations stand beside what lies at `place`, and not in it: each would be read many times."""
    beside = [one for record in records[:MAX_TRIED_ROWS] for one, _ in itertools.islice(_below(record, place, {}), 1)]
    return any(_is_read(one, columns) for one in beside)


def _read(row: Mapping[str, Any], columns: Mapping[str, str]) -> Conversation:
    return (
        read_conversation(map_columns(row, columns), mapped=maps_content(columns))
        if columns
        else read_conversation(row)
    )


def _is_row(record: Any, columns: Mapping[str, str]) -> bool:
    """Whether a record is a row itself: it is read, or refused for a fault of its own."""
    if not isinstance(record, dict):
        return False
    try:
        _read(record, columns)
    except RowRefused as refused:
        return refused.reason not in NOT_KNOWN
    except RecursionError:
        return True  # too deep: the checks say so
    return True


def are_unread(rows: Sequence[Any]) -> bool:
    """Whether nothing knows the layout of most of these rows."""
    return sum(not _is_row(row, _NONE) for row in rows) > USABLE_SHARE * len(rows)


def _is_read(row: Any, columns: Mapping[str, str]) -> bool:
    if not isinstance(row, dict):
        return False
    try:
        found = _read(row, columns)
    except (RowRefused, RecursionError):
        return False
    return found.messages[0].role != "assistant"  # a text alone may be half of what the record says


def places(records: Sequence[Any]) -> list[RowPlace]:
    """Every place that could hold rows, the outer ones first."""
    found: list[RowPlace] = []
    waiting: list[tuple[RowPlace, list[Any]]] = [((), list(records))]
    while waiting and len(found) < MAX_PLACES:
        place, values = waiting.pop(0)
        values = [parsed(value) for value in values[:MAX_TRIED_ROWS]]
        inner: dict[str, list[Any]] = {}
        if _are_told(place, values):
            found.append((*place, EACH))
        elif values and all(map(_holds_items, values)):
            items = [item for value in values for item in _items(value)]
            each = (*place, EACH)
            found += [] if _are_tables(items, each) else [each]
            waiting.append((each, items))
        elif all(isinstance(value, dict) for value in values):
            found += [(*place, mark) for mark in _marks(values)]
            for value in values:
                for key, one in value.items():
                    if isinstance(parsed(one), dict | list) and parsed(one) and not _is_talk(key, parsed(one)):
                        inner.setdefault(key, []).append(one)
        if len(place) < MAX_PLACE_DEPTH:
            waiting += [((*place, key), some) for key, some in inner.items()]
    return found


def _are_tables(items: Sequence[Any], place: RowPlace) -> bool:
    """Whether lists of rows stand there, and no conversations; or the calls of one answer."""
    calls = [item for item in items if isinstance(item, dict) and call_in_columns(item)]
    if len(calls) == len(items) and not any(part_of(name) == "asked" for call in calls for name in call):
        return True
    tables = [table for item in items if (table := objects(item)) is not None]
    return not _is_talked(place) and any(map(_are_asked, tables))


def _is_talked(place: RowPlace) -> bool:
    """Whether a name on the way says that a list there is a conversation."""
    return any(TALK & set(words(key)) for key in place if key != EACH)


def _marks(values: Sequence[dict[str, Any]]) -> list[str]:
    """How each of these objects may be many rows itself."""
    phrased = [BY_PHRASINGS] if values and all(phrasings(value) is not None for value in values) else []
    return [*phrased, BY_LISTS] if values and all(map(_lists, values)) else phrased


def _is_talk(key: str, value: Any) -> bool:
    """Whether something is one conversation by its name; a list of conversations holds such a list in each."""
    if not TALK & set(words(key)) or isinstance(value, dict) or _are_said(value):
        return False
    items = objects(value) or []
    return not any(_is_list_of_turns(name, one) for item in items for name, one in item.items())


def _is_list_of_turns(name: str, value: Any) -> bool:
    return objects(value) is not None and (bool(TALK & set(words(name))) or as_turns(value, name) is not None)


def _are_told(place: RowPlace, values: Sequence[Any]) -> bool:
    """Whether conversations as lists of their texts stand at a place that is called so."""
    return bool(place) and bool(values) and bool(TALK & set(words(place[-1]))) and all(map(_are_said, values))


def _are_said(value: Any) -> bool:
    """Whether a list holds conversations, each as the list of its texts."""
    return isinstance(value, list) and bool(value) and all(are_all_texts(one) and len(one) > 1 for one in value)


def _holds_items(value: Any) -> bool:
    return objects(value) is not None or bool(_named_rows(value) or asked_pairs(value))


def _items(value: Any) -> list[Any]:
    """What a list holds, or an object that is a table by name."""
    return asked_pairs(value) or value if isinstance(value, list) else _named_rows(value)


def _named_rows(value: Any) -> list[Any]:
    """The rows of a table by name: objects that share most of their keys, or lists of such objects (a table under each
    name), or conversations. Numbers and words beside them are about the table; empty: it is none.
    """
    if not isinstance(value, dict) or len(value) < MIN_ALIKE:
        return []
    if _are_talks(value):
        return list(value.values())
    if all(pairs := [asked_pairs(one) for one in value.values()]):
        return [row for rows in pairs for row in rows]
    tables = [table for one in value.values() if (table := objects(one)) is not None]
    if len(tables) >= MIN_ALIKE and 2 * len(tables) > len(value):
        return tables if _share_keys([item for one in tables for item in one[:MAX_TRIED_ROWS]]) else []
    rows = [one for one in value.values() if isinstance(one, dict)]
    others = [one for one in value.values() if not isinstance(one, dict)]
    if len(rows) < MIN_ALIKE or len(others) >= len(rows) or any(isinstance(one, list) for one in others):
        return []
    return rows if _share_keys(rows) else []


def _share_keys(rows: Sequence[dict[str, Any]]) -> bool:
    kinds = [frozenset(one) for one in rows]
    shared = frozenset.intersection(*kinds)
    told = any(part_of(name) != "note" for name in shared)  # numbers are those of paragraphs and of questions too
    return told and len(shared) * 2 > min(map(len, kinds))


def _are_talks(value: dict[str, Any]) -> bool:
    """Whether an object holds a conversation under each of its names, as a list of turns."""
    lists = [one for one in value.values() if one != []]
    if not lists or not all(objects(one) is not None for one in lists):
        return False
    return 2 * sum(as_turns(one, "messages") is not None and not _are_asked(one) for one in lists) >= len(lists)


def _are_asked(items: Sequence[dict[str, Any]]) -> bool:
    """Whether each item has a question of its own: rows, and no turns of one conversation."""
    return len(items) > 1 and all(any(map(is_a_question, item)) for item in items)


def _lists(value: Any) -> dict[str, list[Any]]:
    """The lists of one length of an object that holds a list of questions and one of their answers; else none."""
    lists = {name: one for name, one in value.items() if isinstance(one, list)} if isinstance(value, dict) else {}
    asked = [one for name, one in lists.items() if part_of(name) == "asked" and are_all_texts(one)]
    sizes = {len(one) for one in lists.values()}
    whole = len(asked) == 1 and any(part_of(name) == "answered" for name in lists) and len(sizes) == 1
    return lists if whole and sizes.pop() >= MIN_ALIKE else {}


def _are_questions(record: Any) -> bool:
    """Whether the names of a record are questions that somebody asked, and its values what was answered."""
    if not isinstance(record, dict) or len(record) < MIN_QUESTIONS:
        return False
    if not all(isinstance(value, str) for value in record.values()):
        return False
    asked = sum(len(key.split()) > 1 for key in record)
    answered = sum(looks_like_content(value) for value in record.values())
    return 2 * min(asked, answered) >= len(record)


def is_table(record: Any) -> bool:
    """Whether a record is a whole table: lists of one length under each of its names."""
    if not isinstance(record, dict) or len(record) < MIN_ALIKE:
        return False
    if not all(isinstance(value, list) for value in record.values()) or _are_talks(record):
        return False
    sizes = {len(value) for value in record.values()}
    return len(sizes) == 1 and sizes.pop() >= MIN_ALIKE


def _is_of_a_file(key: str, value: Any) -> bool:
    """Whether a text beside rows says what kind of rows they are, and nothing that belongs to one of them."""
    return isinstance(value, str) and (key.startswith("_") or plain_name(key) in _OF_A_FILE)


def _below(
    value: Any, place: RowPlace, beside: Mapping[str, Any], *, talk: bool = False
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(what stands beside it on the way, a row) for each row at `place` of `value`. `talk`: as _is_talked."""
    value = parsed(value)
    if not place:
        yield from ((beside, row) for row in _ends(value, talk=talk))
    elif place[0] == OWN_TEXT:
        given = {"context": text} if (text := _own_text(value)) else {}
        yield from (({**above, **given}, row) for above, row in _below(value, place[1:], beside, talk=talk))
    elif place[0] == BY_QUESTIONS:
        yield from ((beside, {"question": key, "answer": one}) for key, one in value.items())
    elif place[0] == BY_PHRASINGS:
        given = {name: one for name, one in beside.items() if part_of(name) == "given"}
        yield from ((given, row) for row in phrased(value))
    elif place[0] in (BY_COLUMNS, BY_LISTS):
        yield from _by_place(value, _lists(value) if place[0] == BY_LISTS else value, beside)
    elif place[0] == EACH:
        for item in _items(value):
            yield from _below(item, place[1:], beside, talk=talk)
    elif isinstance(value, dict) and place[0] in value:
        rest = _along(value, place[0])
        if rest is not None:
            talk = talk or _is_talked(place[:1])
            yield from _below(value[place[0]], place[1:], {**beside, **rest}, talk=talk)


def _ends(value: Any, *, talk: bool) -> list[dict[str, Any]]:
    """The rows of what lies at a place: itself; a list as a conversation, or its items where each of them asks."""
    if isinstance(value, dict):
        return [value]
    turns = objects(value)
    if turns is None:
        return [{"conversation": value}] if are_all_texts(value) and talk else []
    return turns if _are_asked(turns) and not talk else [{"messages": value}]


def _by_place(value: Any, lists: Any, beside: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """The rows of an object whose `lists` are columns, with what else it holds beside each."""
    if is_table(lists):
        rest = {name: one for name, one in value.items() if name not in lists}
        yield from (
            ({**beside, **rest}, dict(zip(lists, row, strict=True))) for row in zip(*lists.values(), strict=True)
        )


def _along(value: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """What goes along with each row below `key`; None where that is more than anybody asks each of many rows about."""
    rest = {name: other for name, other in value.items() if name != key and not _is_of_a_file(name, other)}
    if isinstance(value[key], list) and len(value[key]) > MAX_TRIED_ROWS:
        rest = {name: _first_of_a_table(name, other) for name, other in rest.items()}
        if any(objects(other) is not None and len(other) > MAX_CONTENT_BESIDE for other in rest.values()):
            return None
    return rest


def _first_of_a_table(key: str, value: Any) -> Any:
    """The first items of a long list of objects without written texts, which stands beside many rows and belongs to
    none of them: with all of it each row would cost as much as the file. Anything else as it is.
    """
    if not isinstance(value, list) or len(value) <= MAX_TRIED_ROWS or objects(value) is None:
        return value
    return value if not is_note((key, "")) and looks_like_content(value) else value[:MAX_BESIDE]
