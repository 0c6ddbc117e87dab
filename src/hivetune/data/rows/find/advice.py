"""The line of the config that would read a row that nothing reads: tried on the row itself before it is printed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import read_conversation
from hivetune.data.rows.find.leaves import Node, nodes
from hivetune.data.rows.find.names import likely_contents, names_role, part_of, role_of
from hivetune.data.rows.find.pair import sides_of
from hivetune.data.rows.find.talk.turn_lists import as_turns, flat, names_party
from hivetune.data.rows.layouts.columns import looks_like_content, map_columns
from hivetune.data.rows.layouts.said import Row, objects

MAX_TRIED = 12


def columns_for(row: Row) -> dict[str, str] | None:
    """A column map with which the row is read; None where none was found."""
    for tried, columns in enumerate(_guesses(row)):
        if tried >= MAX_TRIED:
            return None
        try:
            read_conversation(map_columns(row, columns), mapped=True)
        except RowRefused:
            continue
        return columns
    return None


def as_option(columns: Mapping[str, str]) -> str:
    """As it is written on the command line."""
    return "--columns " + ",".join(f"{ours}={yours}" for ours, yours in columns.items())


def _guesses(row: Row) -> Iterator[dict[str, str]]:
    """What a person would try: the lists of turns, then a question and an answer by name, then by their place."""
    for path, value in nodes(row):
        items = objects(value)
        if items is None or "[]" in path or any("." in name for name in path):
            continue
        if as_turns(value, path[-1]) is not None:
            yield {"messages": ".".join(path)}
        elif (roles := _two_parties([flat(item) for item in items])) is not None:
            yield {"messages": ".".join(path), "user_role": roles[0], "assistant_role": roles[1]}
    asked, replies = sides_of(row)
    answered = [path for path in replies if not _is_one_of_several(path, replies)]
    yield from ({"prompt": one, "completion": other} for one in asked for other in answered if one != other)
    paths = [".".join(node.path) for node in nodes(row) if _is_written(node)]
    written = [path for path in paths if not _is_one_of_several(path, paths)]
    yield from ({"prompt": one, "completion": other} for one in written for other in answered if one != other)
    yield from ({"prompt": one, "completion": other} for one in asked for other in written if one != other)
    prose = [".".join(node.path) for node in nodes(row) if _is_prose_column(node)]
    if len(prose) == 2:  # names in a language that nobody here knows: who reads a sheet from the left asks first
        yield {"prompt": prose[0], "completion": prose[1]}


def _is_one_of_several(path: str, paths: Sequence[str]) -> bool:
    """Whether other columns have the same name with another number: of `response 1` and `response 2` neither is it."""
    bare = path.strip("0123456789 _")
    return sum(other.strip("0123456789 _") == bare for other in paths) > 1


def _two_parties(flats: list[dict[str, Any]]) -> tuple[str, str] | None:
    """(who asks, the other) where turns name two speakers that nobody knows."""
    if not likely_contents(iter(flats[0])):
        return None
    for path in sorted(flats[0], key=lambda path: not (names_role(path) or part_of(path) == "unknown")):
        values = [one.get(path) for one in flats]
        if not all(isinstance(value, str | int) and not isinstance(value, bool) for value in values):
            continue
        texts = list(dict.fromkeys(str(value).strip() for value in values))
        if len(texts) == 2 < len(values) and all(names_party(text) or text.isdecimal() for text in texts):
            if role_of(texts[0]) == "assistant" or role_of(texts[1]) == "user":
                return texts[1], texts[0]  # a log may begin with an answer
            return texts[0], texts[1]
    return None


def _is_prose_column(node: Node) -> bool:
    named = len(node.path) == 1 and "." not in node.path[0] and part_of(node.path[0]) not in ("note", "media")
    return named and isinstance(node.value, str) and looks_like_content(node.value)


def _is_written(node: Node) -> bool:
    named = "[]" not in node.path and not any("." in name for name in node.path)
    parts = set(map(part_of, node.path))
    return (
        named
        and isinstance(node.value, str)
        and "content" in parts
        and not parts & {"note", "media"}
        and looks_like_content(node.value)
    )
