"""The choice of the rows to answer, their prompts, and the groups of rows that count as one piece of evidence.

All test rows count for the loss; a stratified choice of them is answered by both models.
"""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hivetune.base.paths import quoted
from hivetune.checkers.find import row_checker
from hivetune.config import EvalConfig
from hivetune.data.checks.lessons import lesson_of
from hivetune.data.prepare.near import near_pairs, sketch
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.read import content_id
from hivetune.data.reasons import RowRefused
from hivetune.data.render.dialect import request_hash, template_message
from hivetune.data.snapshot import RowInfo
from hivetune.errors import DataRefused
from hivetune.llama.prompts import prompt_of
from hivetune.train.open import Run, check_eval

SAME_ROW = 0.85  # likeness from which two held-out rows are one piece of evidence, as data.near_duplicates has it


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
        messages = self.info.messages if self.reference is None else prompt_of(self.info.messages)
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
