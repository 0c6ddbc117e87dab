"""What the config's policies leave out of rows that are whole: failures, answers of releases, what was forgotten."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from hivetune.data.intake import interactions
from hivetune.data.intake.interactions import is_forgotten
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import RawRow, parse_row
from hivetune.records import Example


class RowPolicies(Protocol):
    """The settings that are asked, of a job of prepare/examine/stages.py."""

    @property
    def on_failed(self) -> str: ...
    @property
    def on_untrusted(self) -> str: ...
    @property
    def on_own_answers(self) -> str: ...
    @property
    def learn(self) -> Sequence[str]: ...


def apply_policies(example: Example, job: RowPolicies, outside: str) -> Example:
    """The row as the policies take it. Raises RowRefused."""
    if example.lesson == "failure":
        example = _failed(example, job, outside)
    needed = {"sft": "sft", "correction": "corrections"}.get(example.lesson)
    if needed is not None and needed not in job.learn:
        raise RowRefused("not-learned", f"learn does not name {needed}")
    if example.untrusted and job.on_untrusted == "set_aside":
        raise RowRefused("untrusted")
    own = example.answered_by is not None and example.lesson == "sft"
    if own and not is_vouched(example) and job.on_own_answers == "set_aside":
        raise RowRefused("own-answer")
    if example.worse is not None and "pairs" not in job.learn:
        return replace(example, worse=None)  # a correction is a target in any case
    return example


def is_vouched(example: Example) -> bool:
    """Whether the answer to learn was called good: by its success, a rating, or as the better one of two."""
    liked = example.feedback is not None and example.feedback > 0
    return example.success is True or liked or example.lesson in ("correction", "pair")


def _failed(example: Example, job: RowPolicies, outside: str) -> Example:
    """A row whose answer is bad: learned from as that, or as any other. Raises RowRefused."""
    if job.on_failed == "train":
        return replace(example, lesson="sft")
    if outside:
        raise RowRefused("failed-outside", f"the row says {outside!r}: its answer teaches nothing")
    if not {"failures", "pairs"} & set(job.learn):
        raise RowRefused("failed" if example.success is False else "disliked")
    return example


def keep_forgotten_out(raw: RawRow, example: Example, forgotten: frozenset[tuple[str, str]]) -> None:
    """Files still hold what was forgotten; the store does not."""
    content = interactions.row_hash(parse_row(raw.payload))
    who = {"session": example.session, "user": example.user, "row": raw.source, "content": content}
    if is_forgotten(forgotten, source_names(raw), **who):
        raise RowRefused("forgotten")


def source_names(raw: RawRow) -> tuple[str, str]:
    name = raw.source.rpartition(":")[0]
    return name, os.path.realpath(name)
