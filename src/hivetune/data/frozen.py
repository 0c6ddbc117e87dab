"""Frozen questions: never trained on, and asked of every candidate. If a release answered a question correctly, later
releases must answer it correctly too.

  HOME/frozen/NAME/KEY.json   one past win of the release NAME; KEY is the hash of the messages and tools
  eval.frozen                 the user's own files, rows of any layout with a checker

`forget` deletes the questions that came from forgotten rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home, write_json
from hivetune.base.documents import read_document
from hivetune.base.private import make_folder
from hivetune.base.typed import from_plain, to_plain
from hivetune.data.checks.lessons import group_hash, question, read_hash
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.reasons import RowRefused
from hivetune.data.render.dialect import request_hash, template_message
from hivetune.data.snapshot import RowInfo
from hivetune.errors import DataRefused, UsageError
from hivetune.records import Example, Message

Origin = Literal["win", "own"]
FROZEN = "frozen"


@dataclass(frozen=True)
class FrozenQuestion:
    """A conversation without its last answer. `release`: the first release that answered it correctly (past wins only).

    `interaction_id`, `session` and `user` are those of the row of a past win, so that it can be forgotten with the row.
    """

    origin: Origin
    source: str
    messages: tuple[Message, ...]
    checker: Mapping[str, Any] | None
    tools: tuple[Mapping[str, Any], ...] = ()
    reference: str | None = None
    agent: str | None = None
    category: str | None = None
    release: str | None = None
    interaction_id: str | None = None
    session: str | None = None
    user: str | None = None

    @property
    def key(self) -> str:
        return request_hash([template_message(message) for message in self.messages], self.tools)


def frozen_folder(name: str) -> Path:
    """Return the folder of the past wins of the releases NAME."""
    return home() / FROZEN / name


def freeze(name: str, questions: Iterable[FrozenQuestion]) -> int:
    """Store past wins of the releases NAME; return how many are new. Raises OSError, UsageError for a damaged home."""
    # Each is a file of its own, written atomically and never changed: a killed process leaves a complete set.
    folder, new = frozen_folder(name), 0
    make_folder(folder.parent)
    make_folder(folder)
    for win in questions:
        path = folder / f"{win.key}.json"
        if not path.exists():
            write_json(path, {"schema": 1, **to_plain(win)})
            new += 1
    return new


def wins_of(name: str) -> list[FrozenQuestion]:
    """Return the past wins of the releases NAME, by key. Raises UsageError for a damaged file."""
    return [_win(path) for path in sorted(frozen_folder(name).glob("*.json"))]


def names_with_wins() -> list[str]:
    return sorted(path.name for path in (home() / FROZEN).glob("*") if path.is_dir())


def drop_win(name: str, win: FrozenQuestion) -> None:
    """Remove a past win of the releases NAME."""
    (frozen_folder(name) / f"{win.key}.json").unlink()


def is_name(entry: str) -> bool:
    """Return whether an entry of eval.frozen is a name of releases and not a file."""
    return not {"/", ".", "*"} & set(entry)


def own_questions(entries: Sequence[str], checker: Mapping[str, Any] | None) -> list[FrozenQuestion]:
    """Return the user's own questions from the files in eval.frozen. `checker` is for rows without one.

    Raises DataRefused naming the first unusable row, UsageError for a missing file.
    """
    questions = list[FrozenQuestion]()
    paths = [entry for entry in entries if not is_name(entry)]
    if not paths:
        return questions
    for raw in rows_of_files(paths):
        try:
            example = example_of(raw)
        except RowRefused as error:
            raise DataRefused(f"eval.frozen: {raw.source}: {error.reason}", hint=error.hint) from None
        if example.checker is None and checker is None:
            raise DataRefused(
                f"eval.frozen: {example.source} has no checker, so its answers cannot be judged",
                hint="give the row a `checker`, or set eval.checker",
            )
        questions.append(_question("own", example, example.checker or checker))
    return questions


def win_of(info: RowInfo, checker: Mapping[str, Any], release: str) -> FrozenQuestion:
    """Return a held-out row as a past win, to be frozen, because the answer of `release` to it passed its checker."""
    owner = {"interaction_id": info.interaction_id, "session": info.session, "user": info.user}
    return _question("win", info, checker, release=release, **owner)


def _question(
    origin: Origin, row: Example | RowInfo, checker: Mapping[str, Any] | None, **of_win: str | None
) -> FrozenQuestion:
    """Return the messages of a row before its last answer as a question, and that answer as its reference."""
    # Turns after that answer are left out: a release is never asked for them.
    last = max((i for i, message in enumerate(row.messages) if message.role == "assistant"), default=None)
    prompt, reference = row.messages[:last], None if last is None else row.messages[last].content
    return FrozenQuestion(origin, row.source, prompt, checker, row.tools, reference, row.agent, row.category, **of_win)


def frozen_hashes(own_files: Sequence[str] = ()) -> frozenset[int]:
    """Return the 64-bit hashes of all frozen questions; `decide` keeps rows with these hashes out of training."""
    wins = [win for name in names_with_wins() for win in wins_of(name)]
    # A checker is not needed to keep a row out, so any will do.
    own_rows = own_questions(own_files, {"name": "regex", "pattern": "."})
    hashes = set()
    # A question of one turn is compared by its words, whatever precedes or follows it. A longer conversation is
    # compared as a whole, since conversations share their beginnings.
    for messages in (frozen.messages for frozen in (*wins, *own_rows)):
        turns = [message for message in messages if message.role != "system"]
        hashes.add(group_hash(f"question:{question(messages)}") if len(turns) == 1 else read_hash(messages))
    return frozenset(hashes)


def _win(path: Path) -> FrozenQuestion:
    try:
        document = read_document(path)
        if document.pop("schema", None) != 1:
            raise ValueError("another version of Hivetune wrote it")
        return from_plain(FrozenQuestion, document)
    except UsageError as error:
        raise UsageError(error.message, hint="restore it from a copy, or delete it") from None
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}", hint="restore it from a copy, or delete it") from None
