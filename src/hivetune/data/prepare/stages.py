"""The stages of a row: read, clean and render. Each is a function of one row that may refuse it; pool.py runs them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.data.checks.redact.apply import ADVICE, EVERYTHING, PERSONAL, SECRETS, Policy, apply_policy, holds_nothing
from hivetune.data.checks.rules import CHECKS, check_length, check_messages, control_token_check, has_mojibake
from hivetune.data.intake.interactions import is_forgotten, is_forgotten_raw, row_hash
from hivetune.data.judged.answers import is_small_edit
from hivetune.data.raw import RawRow
from hivetune.data.read import ExaminedRow, Note, content_id, parse_row, read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.records import Example, Message, Rendered

SURE_CHARS = 8  # per token; a shorter row fits without a look at the longest token of the vocabulary


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The settings of a preparation that its workers need."""

    columns: Mapping[str, str]
    system_prompts: Mapping[str, str]
    on_overlong: str
    also_train: Sequence[str]
    learn: Sequence[str]
    on_private: Policy
    near_duplicates: float
    max_length: int
    model_folder: Path | None
    forgotten: frozenset[tuple[str, str]] = frozenset()  # (kind, hash) as in hive.db
    set_aside: frozenset[str] = frozenset()  # ids of interactions


class Stages:
    """The stages of one preparation. Each raises RowRefused."""

    def __init__(self, settings: RowSettings):
        self.settings = settings
        self._renderer: Renderer | None = load_renderer(settings.model_folder) if settings.model_folder else None
        if self._renderer is None:
            self._checks = (check_length, *CHECKS)  # before the other checks read the text
        else:
            self._checks = (*CHECKS, control_token_check(self._renderer.control_tokens))
        self._forgotten = settings.forgotten

    def read(self, raw: RawRow) -> ExaminedRow:
        """Return the row as an Example of the right form."""
        settings = self.settings
        try:
            row = read_example(raw, settings.columns, pairs="pairs" in settings.learn)
        except RowRefused:
            if self._forgotten and is_forgotten_raw(self._forgotten, _names_of(raw), raw.payload):
                raise RowRefused("forgotten") from None
            raise
        if self._forgotten:  # the store has removed such rows, but files may still hold them
            content = row_hash(parse_row(raw.payload))
            who = {"session": row.example.session, "user": row.example.user, "row": raw.source, "content": content}
            if is_forgotten(self._forgotten, _names_of(raw), **who):
                raise RowRefused("forgotten")
        self._fit_by_chars(row)
        check_messages(row.example.messages, self._checks)
        if has_mojibake(row.example.messages):
            row.changed += ("mojibake",)
        return row

    def clean(self, row: ExaminedRow) -> ExaminedRow:
        """Redact secrets and personal data, apply the policies, and add the system prompt."""
        settings = self.settings
        example, notes = self._redacted(row.example)
        example = replace(example, id=content_id(example.messages, example.tools))
        example = _apply_policies(example, settings)
        prompt = settings.system_prompts.get(example.agent) if example.agent else None
        if prompt is not None and example.messages[0].role == "user":
            front = replace(example, messages=(Message("system", prompt),), tools=(), checker=None)
            front, more = self._redacted(front)
            example = replace(example, messages=(*front.messages, *example.messages))
            notes += more
        row.example, row.notes = example, notes
        return row

    def render(self, row: ExaminedRow) -> ExaminedRow:
        """Render the row as tokens, if there is a model."""
        example, more, row.worse = self._with_worse(row.example)
        row.notes += more
        changed = [*row.changed, *dict.fromkeys(reason for reason, _ in row.notes)]
        if self._renderer is not None:
            example, row.views = self._fitted(self._renderer, example, changed)
            changed = list(dict.fromkeys(changed))
            if example.lesson != "sft":
                row.views = row.views[-1:]  # only the last answer was judged
        row.example, row.changed = example, tuple(changed)
        return row

    def _with_worse(self, example: Example) -> tuple[Example, tuple[Note, ...], Rendered | None]:
        """Return the row, notes and rendered worse answer; without the worse answer if it can't be used."""
        if example.worse is None:
            return example, (), None
        if is_small_edit(example.messages[-1], example.worse):
            return replace(example, worse=None), (("small-edit", "the better answer is learned alone"),), None
        try:
            bad = replace(example, messages=(*example.messages[:-1], example.worse), worse=None)
            check_messages(bad.messages, self._checks)
            bad, notes = self._redacted(bad)
            view = self._fitted(self._renderer, bad, [])[1][-1] if self._renderer is not None else None
        except RowRefused as refused:
            note = f"the worse answer is not used: {refused.reason}: {refused.hint}"
            return replace(example, worse=None), (("worse-left-out", note),), None
        return replace(example, worse=bad.messages[-1]), notes, view

    def _redacted(self, example: Example) -> tuple[Example, tuple[Note, ...]]:
        """Return the row after redaction, and the replaced texts with their places. Raise RowRefused if a policy
        rejects it.
        """
        if self.settings.on_private != "keep" and holds_nothing(example, EVERYTHING):
            return example, ()
        notes: list[Note] = []
        for kind, rules in (("secret", SECRETS), ("personal", PERSONAL)):
            example, finds = apply_policy(example, rules, self.settings.on_private, kind)
            if finds:
                notes.append((f"redacted-{kind}", f"{', '.join(finds)}; {ADVICE[kind]}"))
        return example, tuple(notes)

    def _fit_by_chars(self, row: ExaminedRow) -> None:
        """Refuse a row that can't fit whatever its tokens are, or remove its last turns, before its text is read.

        Raise TooLong unless `on_overlong` allows removing turns. "cut" needs the tokens and comes later.
        """
        if self._renderer is None or self.settings.on_overlong == "cut":
            return
        messages = row.example.messages
        limit, size = self.settings.max_length, num_chars(messages)
        if size <= limit * SURE_CHARS or size <= limit * self._renderer.longest_token_chars:
            return
        longest = limit * self._renderer.longest_token_chars
        while self.settings.on_overlong == "cut_turns" and messages and num_chars(messages) > longest:
            messages = _without_last_turn(messages)
        if num_chars(messages) > longest or not messages:
            raise TooLong(None, limit, f"{size:,} characters are more than {limit:,} tokens can hold")
        row.example = replace(row.example, messages=messages)
        row.changed += ("cut-turns",)

    def _fitted(self, renderer: Renderer, example: Example, changed: list[str]) -> tuple[Example, tuple[Rendered, ...]]:
        """Return the row and its views of at most max_length tokens, and append to `changed`. Raise RowRefused."""
        limit, policy = self.settings.max_length, self.settings.on_overlong
        views, notes = renderer.render_and_note(example)
        length = _longest(views)
        if length > limit and policy == "cut_turns":
            while _longest(views) > limit:
                messages = _without_last_turn(example.messages)
                if not any(message.role == "assistant" and message.weight for message in messages):
                    raise TooLong(length, limit)
                example = replace(example, messages=messages)
                views, notes = renderer.render_and_note(example)
            changed.append("cut-turns")
        elif length > limit and policy == "cut":
            cut = [replace(view, tokens=view.tokens[:limit], trained=view.trained[:limit]) for view in views]
            views = tuple(view for view in cut if any(view.trained))
            if not views:
                raise RowRefused("no-trained-token", f"the first {limit} tokens hold no answer")
            changed.append("cut")
        elif length > limit:
            raise TooLong(length, limit)
        changed += notes
        return example, views


def _names_of(raw: RawRow) -> tuple[str, str]:
    """Return the user's name for the row's file, and its real path."""
    name = raw.source.rpartition(":")[0]
    return name, os.path.realpath(name)


class TooLong(RowRefused):
    """The refusal of a row that is too long, with its number of tokens if they were counted, for the histogram."""

    def __init__(self, length: int | None, limit: int, hint: str = ""):
        super().__init__("too-long", hint or f"{length:,} tokens, max_length is {limit:,}")
        self.length = length


def num_chars(messages: Sequence[Message]) -> int:
    """Return the number of characters of the contents."""
    return sum(len(message.content) for message in messages)


def _without_last_turn(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages up to the answer before the last one; none if there is no such answer."""
    end = len(messages) - 1
    while end > 0 and messages[end - 1].role != "assistant":
        end -= 1
    return tuple(messages[:end])


def _longest(views: Sequence[Rendered]) -> int:
    return max(len(view.tokens) for view in views)


def _apply_policies(example: Example, settings: RowSettings) -> Example:
    """Return the row as the policies of the config allow it. Raise RowRefused."""
    if example.lesson == "failure" and "failed" in settings.also_train:
        example = replace(example, lesson="sft")
    elif example.lesson == "failure" and not {"failures", "pairs"} & set(settings.learn):
        raise RowRefused("failed" if example.success is False else "disliked")
    needed = {"sft": "sft", "correction": "corrections"}.get(example.lesson)
    if needed is not None and needed not in settings.learn:
        raise RowRefused("not-learned", f"learn does not name {needed}")
    if example.untrusted and "untrusted" not in settings.also_train:
        raise RowRefused("untrusted")
    is_own_answer = example.answered_by is not None and example.lesson == "sft"
    if is_own_answer and not is_vouched(example) and "own_answers" not in settings.also_train:
        raise RowRefused("own-answer")
    if example.worse is not None and "pairs" not in settings.learn:
        return replace(example, worse=None)  # a correction is a target in any case
    return example


def is_vouched(example: Example) -> bool:
    """Return whether the answer was called good: by its success, a rating, or as the better one of two."""
    liked = example.feedback is not None and example.feedback > 0
    return example.success is True or liked or example.lesson in ("correction", "pair")
