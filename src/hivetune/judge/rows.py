"""The choice of the rows to answer, their prompts, and the groups of rows that count as one piece of evidence.

All test rows count for the loss; a stratified choice of them is answered by both models. Frozen questions are asked
besides: the user's own, and some that a release answered correctly.
"""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.documents import read_document
from hivetune.base.paths import quoted
from hivetune.checkers import row_checker
from hivetune.config import EvalConfig
from hivetune.data.checks.lessons import lesson_of
from hivetune.data.frozen import FrozenQuestion, freeze, is_name, names_with_wins, own_questions, win_of, wins_of
from hivetune.data.prepare.near import near_pairs, sketch
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.read import content_id
from hivetune.data.reasons import RowRefused
from hivetune.data.render.dialect import request_hash, template_message
from hivetune.data.snapshot import RowInfo, open_snapshot
from hivetune.errors import DataRefused, UsageError
from hivetune.models.sides import parse_side
from hivetune.records import Message
from hivetune.release.registry import Release, releases
from hivetune.run.folder import EVALUATION, read_record
from hivetune.train.open import Run, check_eval

SAME_ROW = 0.85  # likeness from which two held-out rows are one piece of evidence, as data.near_duplicates has it
WINS_PER_RELEASE = 20
MAX_WINS = 200  # a set is asked of every candidate: 200 answers of 64 tokens take a minute at 217 tokens/s


@dataclass(frozen=True)
class Prompt:
    """A row to ask: its conversation up to its last answer.

    `group`: rows of one group are one piece of evidence. `checker`: the row's own or the config's. `origin`: `win` or
    `own` for a frozen question, empty for a held-out row.
    """

    info: RowInfo
    group: str
    checker: Mapping[str, Any] | None
    origin: str = ""

    @property
    def reference(self) -> str | None:
        """Return the row's own last answer, which is not part of the prompt; None if the row ends with the user."""
        last = self.info.messages[-1]
        return last.content if last.role == "assistant" else None

    @property
    def said(self) -> str:
        """Return the user's last message as text for people."""
        return next((message.content for message in reversed(self.info.messages) if message.role == "user"), "")

    @cached_property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """Return the conversation as messages of a request."""
        messages = self.info.messages[: None if self.reference is None else -1]
        return tuple(template_message(message) for message in messages)

    @cached_property
    def key(self) -> str:
        """Return the hash of the request's messages and tools."""
        return request_hash(self.messages, self.info.tools)


def prompts_of_run(run: Run, config: EvalConfig) -> list[Prompt]:
    """Return the prompts of a run's chosen held-out rows. Raises DataRefused if nothing is held out, UsageError for a
    broken checker in the config.
    """
    check_eval(config)
    infos = [run.snapshot.info(row) for row in run.snapshot.rows("test")]
    if not infos:
        sides = f"{run.config.eval.baseline} {quoted(run.folder)}"
        hint = f"answer rows of your own: hivetune compare {sides} --rows FILE"
        raise DataRefused(f"{run.folder} has no held-out rows", hint=hint)
    return _chosen(infos, config)


def prompts_of_rows(paths: Sequence[str], config: EvalConfig) -> tuple[list[Prompt], dict[str, int]]:
    """Return at most `config.prompts` prompts from the rows in files, and reason -> number of rows that could not be
    read.

    A row may end with the user: its own answer is only shown to people. Raises DataRefused if no row is left,
    UsageError for missing files.
    """
    check_eval(config)
    rows: list[RowInfo] = []
    refused: dict[str, int] = defaultdict(int)
    names = ("source", "agent", "category", "session", "time", "messages", "tools", "checker")
    for raw in rows_of_files(paths):
        try:
            example = example_of(raw)
        except RowRefused as error:
            refused[error.reason] += 1
            continue
        identity = content_id(example.messages, example.tools)
        fields: dict[str, Any] = {name: getattr(example, name) for name in names}
        rows.append(RowInfo(row=len(rows), id=identity, interaction_id=None, split="test", **fields))
    if not rows:
        raise DataRefused(f"{', '.join(paths)} has no questions", hint=f"see why: hivetune check {quoted(paths[0])}")
    return _chosen(rows, config), dict(refused)


def _chosen(infos: Sequence[RowInfo], config: EvalConfig) -> list[Prompt]:
    chosen, groups = set(choose_rows(infos, config.prompts)), evidence_groups(infos)
    asked = [info for info in infos if info.row in chosen]
    return [Prompt(info, groups[info.row], row_checker(info.checker, config.checker)) for info in asked]


def choose_rows(rows: Iterable[RowInfo], count: int) -> list[int]:
    """Return at most `count` row numbers, ascending, with the shares of agents and categories in `rows`, and each of
    these at least once if there is room.
    """
    # By the rows' contents only, so that runs on the same snapshot answer the same prompts.
    strata: dict[tuple[str, str], list[tuple[bytes, int]]] = defaultdict(list)
    for row in rows:
        rank = hashlib.blake2b(f"prompts/{row.id}".encode(), digest_size=8).digest()
        strata[row.agent or "", row.category or ""].append((rank, row.row))
    ranked = []
    for stratum in strata.values():
        ranked += [(place / len(stratum), rank, row) for place, (rank, row) in enumerate(sorted(stratum))]
    return sorted(row for _, _, row in sorted(ranked)[:count])


def evidence_groups(rows: Sequence[RowInfo]) -> dict[int, str]:
    """Return row number -> group: rows of one session, and near-duplicates, are one piece of evidence.

    A group is named by the session of its first row, or the row's id if it has no session.
    """
    first = list(range(len(rows)))  # of each row an earlier one of its group, or itself

    def lead(place: int) -> int:
        while first[place] != place:
            place = first[place]
        return place

    lessons = [lesson_of(row.messages) for row in rows]
    sketches = io.BytesIO(b"".join(sketch(lesson, SAME_ROW) for lesson in lessons))
    pairs = near_pairs(sketches, SAME_ROW, range(len(rows)), lessons.__getitem__) if rows else ()
    sessions: dict[str, int] = {}
    same = [(place, sessions.setdefault(row.session or row.id, place)) for place, row in enumerate(rows)]
    for one, other in (*same, *((pair.row, pair.other) for pair in pairs if pair.share is not None)):
        leads = lead(one), lead(other)
        first[max(leads)] = min(leads)
    leaders = [rows[lead(place)] for place in range(len(rows))]
    return {row.row: leader.session or leader.id for row, leader in zip(rows, leaders, strict=True)}


# Frozen questions.


def choose_wins(answers: Sequence[Mapping[str, Any]], num_kept: int) -> list[Mapping[str, Any]]:
    """Return the answers of an evaluation (rows of `answers` in eval.json) to freeze when its model becomes champion.

    There are at most WINS_PER_RELEASE, and at most MAX_WINS together with the `num_kept` earlier ones.
    """

    def rank(row: Mapping[str, Any]) -> tuple[bool, bytes]:
        return bool(row["base"]["success"]), hashlib.blake2b(row["id"].encode(), digest_size=8).digest()

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
