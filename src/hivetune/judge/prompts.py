"""The prompts of a comparison: a run's held-out rows, or the rows of any file that `data check` reads."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hivetune.checkers.find import row_checker
from hivetune.config import EvalConfig
from hivetune.data.prepare.understand import example_of, rows_of_files
from hivetune.data.read import content_id
from hivetune.data.reasons import RowRefused
from hivetune.data.render.dialect import template_message
from hivetune.data.snapshot import RowInfo
from hivetune.errors import DataRefused
from hivetune.judge.answers import Prompt, last_question
from hivetune.judge.held_out import choose_prompts, evidence_groups, plan_evaluation
from hivetune.llama.prompts import prompt_of
from hivetune.records import Example, Message
from hivetune.train.open import Run, check_eval


def prompts_of_run(run: Run, config: EvalConfig) -> list[Prompt]:
    """Return the held-out rows that `hivetune eval` answers. Raises DataRefused when nothing is held out."""
    _, generate = plan_evaluation(run.snapshot, config)
    if not generate.rows:
        raise DataRefused(f"{run.folder} has no held-out rows", hint="give rows of your own: --rows FILE")
    groups = evidence_groups([run.snapshot.info(row) for row in run.snapshot.rows("test")])
    return [_prompt(run.snapshot.info(row), groups[row], config.checker) for row in generate.rows]


def prompts_of_rows(paths: Sequence[str], config: EvalConfig) -> tuple[list[Prompt], dict[str, int]]:
    """Return at most `config.prompts` of the rows in files, and how many rows could not be read, by reason.

    A row needs an answer of its own only for people to see; one that ends with the user is asked as it is. Raises
    DataRefused when no row is left, UsageError for files that are not there.
    """
    check_eval(config)
    rows: list[RowInfo] = []
    refused: dict[str, int] = {}
    for raw in rows_of_files(paths):
        try:
            rows.append(_info(len(rows), example_of(raw)))
        except RowRefused as error:
            refused[error.reason] = refused.get(error.reason, 0) + 1
    if not rows:
        raise DataRefused(f"{', '.join(paths)} has no questions", hint=f"see why: hivetune data check {paths[0]}")
    chosen = set(choose_prompts(rows, config.prompts))
    groups = evidence_groups(rows)
    return [_prompt(info, groups[info.row], config.checker) for info in rows if info.row in chosen], refused


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """Return a hash that changes with the prompts and their order."""
    return hashlib.sha256("".join(prompt.key for prompt in prompts).encode()).hexdigest()


def timed_first(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` of the prompts, spread over all of them: neighbours are often of one file or agent."""
    if count >= len(prompts):
        return list(prompts)
    return [prompts[number * len(prompts) // count] for number in range(count)]


def _info(row: int, example: Example) -> RowInfo:
    example = replace(example, id=content_id(example.messages, example.tools))
    return RowInfo(
        row=row,
        id=example.id,
        interaction_id=None,
        source=example.source,
        split="test",
        agent=example.agent,
        category=example.category,
        session=example.session,
        time=example.time,
        messages=example.messages,
        tools=example.tools,
        checker=example.checker,
    )


def _prompt(info: RowInfo, group: str, checker: Mapping[str, Any] | None) -> Prompt:
    last = info.messages[-1]
    return Prompt(
        row=info.row,
        id=info.id,
        source=info.source,
        agent=info.agent,
        category=info.category,
        group=group,
        messages=tuple(template_message(message) for message in _request(info.messages)),
        tools=tuple(info.tools),
        checker=row_checker(info.checker, checker),
        said=last_question(info.messages),
        reference=last.content if last.role == "assistant" else None,
    )


def _request(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return prompt_of(messages) if messages[-1].role == "assistant" else messages
