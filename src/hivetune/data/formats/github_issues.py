"""Issues and comments of GitHub as its REST API lists them, one an object. Who answers is `--columns assistant=LOGIN`.

https://docs.github.com/en/rest/issues/comments
"""

from collections.abc import Iterator

from hivetune.data.pieces.fields import as_time
from hivetune.data.pieces.format import Lines, Log
from hivetune.data.pieces.logs import PlacedRow, conversation, events
from hivetune.data.pieces.said import Row, one_of


def _login(record: Row) -> str:
    """Return who wrote an issue or a comment; `ghost` is GitHub's name for a deleted account."""
    return str(one_of(one_of(record, "author", "user"), "login") or "ghost")


def _text(record: Row) -> str:
    return "\n\n".join(str(text) for text in (record.get("title"), record.get("body")) if text).strip()


def _is_listed(event: Row) -> bool:
    """Return whether an object is an issue or a comment as the REST API lists them."""
    named = {"html_url", "user", "body"} <= event.keys() and str(event["html_url"]).startswith("http")
    return named and ("issue_url" in event or ("title" in event and isinstance(event.get("comments_url"), str)))


def _listed_rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each issue: its own text, where it is listed, and the comments in the order of their times."""
    issues: dict[str, list[tuple[float, int, dict[str, str]]]] = {}
    for number, event, text in events(lines):
        if event is None or not _is_listed(event):
            yield number, text
        elif comment := _text(event):
            turn = {"speaker": _login(event), "content": comment}
            turns_of = issues.setdefault(str(one_of(event, "issue_url", "url")), [])
            turns_of.append((as_time(event.get("created_at")) or 0, number, turn))
    for issue, turns_of in issues.items():
        turns = [turn for *_, turn in sorted(turns_of, key=lambda timed: timed[:2])]
        yield min(number for _, number, _ in turns_of), conversation("github-issues", turns, session_id=issue)


FORMAT = Log("github-rest", lambda head: bool(head.events) and all(map(_is_listed, head.events)), _listed_rows)
