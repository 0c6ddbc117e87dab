"""Which rows are answered, which of them are one piece of evidence, and how a row is asked.

All test rows count for the loss; a stratified choice of them is answered by both models.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivetune.base.paths import quoted
from hivetune.checkers.find import row_checker
from hivetune.config import EvalConfig
from hivetune.data.checks.lessons import lesson_of
from hivetune.data.prepare.near import near_copies, sketch
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.read import content_id
from hivetune.data.reasons import RowRefused
from hivetune.data.render.dialect import request_hash, template_message
from hivetune.data.snapshot import RowInfo
from hivetune.errors import DataRefused
from hivetune.llama.prompts import prompt_of
from hivetune.records import Message
from hivetune.train.open import Run, check_eval

SAME_ROW = 0.85  # likeness from which two held-out rows are one piece of evidence, as data.near_duplicates has it


@dataclass(frozen=True)
class Prompt:
    """A held-out conversation up to its last answer, which is `reference`. Messages and tools as a server takes them.

    `group`: rows of one group are one piece of evidence. `said`: the last thing that the user said, for people.
    """

    row: int
    id: str
    source: str
    agent: str | None
    category: str | None
    group: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    checker: Mapping[str, Any] | None
    said: str
    reference: str | None
    origin: str = ""  # of a frozen question: win or own; of a held-out row nothing

    @property
    def key(self) -> str:
        """Return the hash of a request to a server."""
        return request_hash(self.messages, self.tools)


def prompts_of_run(run: Run, config: EvalConfig) -> list[Prompt]:
    """Return the held-out rows that are answered. Raises DataRefused when nothing is held out, UsageError for a broken
    checker in the config."""
    check_eval(config)
    infos = [run.snapshot.info(row) for row in run.snapshot.rows("test")]
    if not infos:
        sides = f"{run.config.eval.baseline} {quoted(run.folder)}"
        hint = f"answer rows of your own: hivetune compare {sides} --rows FILE"
        raise DataRefused(f"{run.folder} has no held-out rows", hint=hint)
    return _chosen(infos, config)


def prompts_of_rows(paths: Sequence[str], config: EvalConfig) -> tuple[list[Prompt], dict[str, int]]:
    """Return at most `config.prompts` of the rows in files, and how many rows could not be read, by reason.

    A row needs an answer of its own only for people to see; one that ends with the user is asked as it is. Raises
    DataRefused when no row is left, UsageError for files that are not there.
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
    return [_prompt(info, groups[info.row], config.checker) for info in infos if info.row in chosen]


def choose_rows(rows: Iterable[RowInfo], count: int) -> list[int]:
    """Choose at most `count` row numbers, ascending, with the shares of agents and categories in `rows`, each of them
    at least once where there is room."""
    # By the rows' contents only, so that runs on the same snapshot answer the same prompts.
    strata: dict[tuple[str, str], list[RowInfo]] = defaultdict(list)
    for row in rows:
        strata[row.agent or "", row.category or ""].append(row)
    ranked = []
    for stratum in strata.values():
        ordered = sorted(stratum, key=lambda row: (_rank(row), row.row))
        ranked += [(position / len(ordered), _rank(row), row.row) for position, row in enumerate(ordered)]
    return sorted(row for _, _, row in sorted(ranked)[:count])


def _rank(row: RowInfo) -> bytes:
    return hashlib.blake2b(f"prompts/{row.id}".encode(), digest_size=8).digest()


def evidence_groups(rows: Sequence[RowInfo]) -> dict[int, str]:
    """Return row number -> group: rows of one session, and near-duplicates, are one piece of evidence.

    A group has the name of the session, or else of the row, that comes first.
    """
    first = list(range(len(rows)))  # of each row an earlier one of its group, or itself

    def lead(place: int) -> int:
        while first[place] != place:
            place = first[place]
        return place

    lessons = [lesson_of(row.messages) for row in rows]
    sketches = memoryview(b"".join(map(sketch, lessons)))
    near = near_copies(sketches, SAME_ROW, lessons.__getitem__, range(len(rows))).copies if rows else ()
    sessions: dict[str, int] = {}
    same = [(place, sessions.setdefault(row.session or row.id, place)) for place, row in enumerate(rows)]
    for one, other in (*same, *((copy, original) for copy, original, _ in near)):
        leads = lead(one), lead(other)
        first[max(leads)] = min(leads)
    leaders = [rows[lead(place)] for place in range(len(rows))]
    return {row.row: leader.session or leader.id for row, leader in zip(rows, leaders, strict=True)}


def last_question(messages: Sequence[Message]) -> str:
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


def _prompt(info: RowInfo, group: str, checker: Mapping[str, Any] | None) -> Prompt:
    last = info.messages[-1]
    request = prompt_of(info.messages) if last.role == "assistant" else info.messages
    return Prompt(
        row=info.row,
        id=info.id,
        source=info.source,
        agent=info.agent,
        category=info.category,
        group=group,
        messages=tuple(template_message(message) for message in request),
        tools=tuple(info.tools),
        checker=row_checker(info.checker, checker),
        said=last_question(info.messages),
        reference=last.content if last.role == "assistant" else None,
    )
