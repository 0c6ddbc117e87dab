"""GitHub's issues with their comments: as `gh issue list --json number,title,body,author,comments` writes them, and as
the REST API lists issues and comments, one an object. Who answers is `--columns assistant=LOGIN`.

https://cli.github.com/manual/gh_issue_list and https://docs.github.com/en/rest/issues/comments
"""

from collections.abc import Iterator

from hivetune.data.pieces.fields import as_time
from hivetune.data.pieces.format import Format, Lines, Log
from hivetune.data.pieces.logs import PlacedRow, conversation, events
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.session import ASSISTANT, spoken


def read(record: Row) -> Conversation | None:
    has_columns = {"title", "body"} <= record.keys() and isinstance(record["comments"], list)
    if not has_columns or one_of(record.get("author"), "login") is None:
        return None
    turns = [(_login(record), _text(record))]
    turns += [(_login(c), c["body"]) for c in objects(record["comments"]) or [] if c.get("body")]
    return spoken("github-issues", turns, record.get(ASSISTANT))


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


FORMAT = Format("github-issues", read, needs=names("comments"))
LISTED_FORMAT = Log("github-rest", lambda head: bool(head.events) and all(map(_is_listed, head.events)), _listed_rows)
