"""GitHub: issues with their comments, as `gh issue list --json number,title,body,author,comments` writes them. Who
answers is `--columns assistant=LOGIN`.

https://cli.github.com/manual/gh_issue_list
"""

from typing import Any

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, names, objects, one_of
from hivetune.data.pieces.session import ASSISTANT, spoken


def recognise(record: Row) -> bool:
    known = {"title", "body"} <= record.keys() and isinstance(record["comments"], list)
    return known and one_of(record.get("author"), "login") is not None


def rows(record: Row) -> Conversation:
    turns = [(record["author"]["login"], f"{record['title']}\n\n{record['body']}".strip())]
    turns += [(_login(one), one["body"]) for one in objects(record["comments"]) or [] if one.get("body")]
    return spoken("github-issues", turns, record.get(ASSISTANT))


def _login(record: Row) -> Any:
    return str(one_of(one_of(record, "author", "user"), "login"))


FORMAT = Format("github-issues", recognise, rows, needs=names("comments"))
