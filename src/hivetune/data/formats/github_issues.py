"""GitHub: issues with their comments, as `gh issue list --json number,title,body,author,comments` writes them. Who
answers is `--columns assistant=LOGIN`.

https://cli.github.com/manual/gh_issue_list
"""

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Conversation, Row, objects, one_of
from hivetune.data.pieces.session import ASSISTANT, read_session


def recognise(record: Row) -> bool:
    named = one_of(record.get("author"), "login") is not None
    return named and {"title", "body"} <= record.keys() and isinstance(record.get("comments"), list)


def rows(record: Row) -> Conversation:
    first = {"speaker": record["author"]["login"], "content": f"{record['title']}\n\n{record['body']}".strip()}
    said = [one for one in objects(record["comments"]) or [] if one.get("body")]
    turns = [first, *({"speaker": _login(one), "content": one["body"]} for one in said)]
    return read_session({"hivetune_session": "github-issues", "messages": turns, ASSISTANT: record.get(ASSISTANT)})


def _login(comment: Row) -> str:
    return str(one_of(comment.get("author"), "login") or one_of(comment.get("user"), "login"))


FORMAT = Format("github-issues", recognise, rows, needs=frozenset(("comments",)))
