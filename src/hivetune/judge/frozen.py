"""Frozen questions, asked besides the held-out rows: the user's own, and some that a release answered correctly."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.documents import read_document
from hivetune.config import EvalConfig
from hivetune.data.frozen import FrozenQuestion, freeze, is_name, names_with_wins, own_questions, win_of, wins_of
from hivetune.data.snapshot import RowInfo, open_snapshot
from hivetune.errors import UsageError
from hivetune.judge.rows import Prompt
from hivetune.models.sides import parse_side
from hivetune.records import Message
from hivetune.release.registry import Release, releases
from hivetune.run.folder import EVALUATION, read_record

WINS_PER_RELEASE = 20
MAX_WINS = 200  # a set is asked of every candidate: 200 answers of 64 tokens take a minute at 217 tokens/s


def choose_wins(answers: Sequence[Mapping[str, Any]], num_kept: int) -> list[Mapping[str, Any]]:
    """Return the answers of an evaluation (rows of `answers` in eval.json) to freeze when its model becomes champion.

    There are at most WINS_PER_RELEASE, and at most MAX_WINS together with the `num_kept` earlier ones.
    """

    def rank(row: Mapping[str, Any]) -> tuple[bool, bytes]:
        return bool(row["base"]["success"]), blake2b(row["id"].encode(), digest_size=8).digest()

    # Only correct answers, first ones that the baseline got wrong: they are what training won.
    right = [answer for answer in answers if answer["checker"] is not None and answer["tuned"]["success"]]
    return sorted(right, key=rank)[: max(0, min(WINS_PER_RELEASE, MAX_WINS - num_kept))]


def frozen_prompts(settings: EvalConfig, sides: Iterable[str], own: str | None = None) -> list[Prompt]:
    """Return the prompts that are asked in addition to the held-out rows: past wins of the sides' releases, and the
    user's own.

    Their numbers are -1, -2, ..., because they are not rows of a snapshot. `own`: the name of the cycle's releases,
    which may have none yet. Raises DataRefused for an unusable file, UsageError for a damaged set and for an unknown
    release name.
    """
    names = {side.name.partition("@")[0] for side in map(parse_side, sides) if side.kind == "release"}
    named = {entry for entry in settings.frozen if is_name(entry)}
    if named:
        with closing(open_database()) as database:
            known = {own, *names_with_wins(), *(release.name for release in releases(database))}
        if unknown := sorted(named - known):  # it asked nothing and told nobody
            hint = f"see them: hivetune releases; if it is a file: ./{unknown[0]}"
            raise UsageError(f"eval.frozen: no release is called {unknown[0]!r}", hint=hint)
    questions = [question for name in sorted(names | named) for question in wins_of(name)]
    questions += own_questions(settings.frozen, settings.checker)
    unique = {question.key: question for question in reversed(questions)}  # of equal ones the first counts: a past win
    return [_prompt(-number, question, settings) for number, question in enumerate(reversed(unique.values()), 1)]


def _prompt(number: int, question: FrozenQuestion, settings: EvalConfig) -> Prompt:
    """Return a frozen question as a prompt."""
    answer = () if question.reference is None else (Message("assistant", question.reference),)
    names = ("source", "agent", "category", "session", "interaction_id", "tools")
    fields: dict[str, Any] = {name: getattr(question, name) for name in names}
    messages = (*question.messages, *answer)
    info = RowInfo(row=number, id=question.key, split="test", time=None, messages=messages, checker=None, **fields)
    # A function is of the config alone: the home must not name code to run.
    is_function = (question.checker or {}).get("name") == "function"
    return Prompt(info, question.key, settings.checker if is_function else question.checker, question.origin)


def freeze_wins(release: Release) -> int:
    """Freeze questions that this release answers right; return the number of new ones.

    It is 0 if the release was not evaluated, its adapter changed since, no answer was checked, or its snapshot is gone.
    """
    path = release.folder / EVALUATION
    if not path.is_file():
        return 0
    evaluation = read_document(path)
    if evaluation.get("adapter_sha256") != release.adapter_sha256:
        return 0
    try:
        snapshot = open_snapshot(Path(read_record(release.folder).get("snapshot", "(not recorded)")))
    except UsageError:  # deleted since: the rows can't be read again
        return 0
    chosen = choose_wins(evaluation["answers"], len(wins_of(release.name)))
    return freeze(release.name, [win_of(snapshot.info(row["row"]), row["checker"], release.label) for row in chosen])
