"""The stages of a row: read, clean, render. Each is a function of one row that may refuse it; work.py runs them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.data.checks.parts import leave_parts_out
from hivetune.data.checks.placeholders import refuse_placeholder
from hivetune.data.checks.policies import apply_policies, keep_forgotten_out, source_names
from hivetune.data.checks.redact.apply import ADVICE, EVERYTHING, PERSONAL, SECRETS, Policy, apply_policy, holds_nothing
from hivetune.data.checks.rules import CHECKS, Messages, check_length, check_messages, control_token_check
from hivetune.data.intake.interactions import is_forgotten_raw
from hivetune.data.judged.answers import is_small_edit
from hivetune.data.reasons import RowRefused
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import RenderedView, Renderer
from hivetune.data.rows.read import RawRow, content_id, read_example
from hivetune.records import Example, Message, Rendered

SURE_CHARS = 8  # characters a token; up to here the vocabulary isn't asked for its longest one


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """What all chunks of one preparation have in common; plain values, because it travels as JSON."""

    columns: Mapping[str, str]
    system_prompts: Mapping[str, str]
    on_overlong: str
    on_failed: str
    on_untrusted: str
    on_own_answers: str
    on_tools: str
    on_reasoning: str
    learn: Sequence[str]
    on_secret: Policy
    on_personal: Policy
    near: bool
    max_length: int
    model_folder: str | None
    keep_raw: bool
    forgotten: tuple[tuple[str, str], ...] = ()  # (kind, hash) as in hive.db


Note = tuple[str, str]  # a reason of those that change a row, and what was done where


@dataclass(slots=True)
class ExaminedRow:
    """A row on its way: each stage puts down what it finds. `views` stays empty without a model; `failed_outside`: what
    failed beside the answer."""

    raw: RawRow
    example: Example
    layout: str
    failed_outside: str
    changed: list[str]
    notes: tuple[Note, ...] = ()
    views: tuple[RenderedView, ...] = ()
    worse: RenderedView | None = None


class Stages:
    """Of rows under one job. Each raises RowRefused. `few_labels`: whether many rows of the file share few answers."""

    def __init__(self, job: ChunkJob):
        self._job = job
        self._renderer: Renderer | None = load_renderer(Path(job.model_folder)) if job.model_folder else None
        checks: list[Callable[[Messages], None]] = list(CHECKS)
        if self._renderer is None:
            checks.insert(0, check_length)  # before anything reads the text
        else:
            checks.append(control_token_check(self._renderer.control_tokens))
        self._checks = tuple(checks)
        self._forgotten = frozenset((kind, value) for kind, value in job.forgotten)
        self.few_labels: Callable[[], bool] = lambda: False

    def read(self, raw: RawRow) -> ExaminedRow:
        """The row as an Example that has the right form."""
        job = self._job
        try:
            read = leave_parts_out(read_example(raw, job.columns, pairs="pairs" in job.learn), job)
        except RowRefused:
            if is_forgotten_raw(self._forgotten, source_names(raw), raw.payload):
                raise RowRefused("forgotten") from None
            raise
        if self._forgotten:
            keep_forgotten_out(raw, read.example, self._forgotten)
        example, shortened = self._sized(read.example)
        check_messages(example.messages, self._checks)
        return ExaminedRow(raw, example, read.layout, read.failed_outside, [*read.changed, *shortened])

    def clean(self, row: ExaminedRow) -> ExaminedRow:
        """Without secrets and personal data, by the policies, and with its system prompt."""
        job = self._job
        example, notes = self._redacted(row.example)
        example = replace(example, id=content_id(example.messages, example.tools))
        example = apply_policies(example, job, row.failed_outside)
        row.changed += refuse_placeholder(example.messages, self.few_labels)  # a failed row says so itself
        prompt = job.system_prompts.get(example.agent) if example.agent else None
        if prompt is not None and example.messages[0].role == "user":
            front = replace(example, messages=(Message("system", prompt),), tools=(), checker=None)
            front, more = self._redacted(front)
            example = replace(example, messages=(*front.messages, *example.messages))
            notes += more
        row.example, row.notes = example, notes
        return row

    def render(self, row: ExaminedRow) -> ExaminedRow:
        """As tokens of the model, if there is one."""
        example, more, row.worse = self._with_worse(row.example)
        row.notes += more
        row.changed += dict.fromkeys(reason for reason, _ in row.notes)
        if self._renderer is not None:
            example, row.views = self._fitted(self._renderer, example, row.changed)
            row.changed = list(dict.fromkeys(row.changed))
            if example.lesson != "sft":
                row.views = row.views[-1:]  # only the last answer was judged
        row.example = example
        return row

    def _with_worse(self, example: Example) -> tuple[Example, tuple[Note, ...], RenderedView | None]:
        """The row with its worse answer checked, redacted and rendered, or without it and the note that says why."""
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
            why = f"the worse answer is not used: {refused.reason}: {refused.hint}"
            return replace(example, worse=None), (("worse-left-out", why),), None
        return replace(example, worse=bad.messages[-1]), notes, view

    def _redacted(self, example: Example) -> tuple[Example, tuple[Note, ...]]:
        """The row as the policies want it, and what was replaced where. Raises RowRefused."""
        if "keep" not in (self._job.on_secret, self._job.on_personal) and holds_nothing(example, EVERYTHING):
            return example, ()
        notes: list[Note] = []
        for kind, rules, policy in (
            ("secret", SECRETS, self._job.on_secret),
            ("personal", PERSONAL, self._job.on_personal),
        ):
            example, found = apply_policy(example, rules, policy, kind)
            if found:
                notes.append((f"redacted-{kind}", f"{', '.join(found)}; {ADVICE[kind]}"))
        return example, tuple(notes)

    def _sized(self, example: Example) -> tuple[Example, list[str]]:
        """Before anything reads the text: a row that can't fit whatever its tokens are costs no more than its length.

        Raises TooLong, or leaves out the last turns where `on_overlong` says so; "cut" is left to the tokens.
        """
        if self._renderer is None or self._job.on_overlong == "cut":
            return example, []
        limit, size = self._job.max_length, num_chars(example.messages)
        if size <= limit * SURE_CHARS or size <= limit * self._renderer.longest_token_chars:
            return example, []
        longest = limit * self._renderer.longest_token_chars
        kept = example.messages
        while self._job.on_overlong == "cut_turns" and kept and num_chars(kept) > longest:
            kept = _without_last_turn(kept)
        if num_chars(kept) > longest or not kept:
            raise TooLong(None, limit, f"{size:,} characters are more than {limit:,} tokens can hold")
        return replace(example, messages=kept), ["cut-turns"]

    def _fitted(
        self, renderer: Renderer, example: Example, changed: list[str]
    ) -> tuple[Example, tuple[RenderedView, ...]]:
        """The row rendered, each view at most max_length tokens long. Raises RowRefused; appends to `changed`."""
        limit, policy = self._job.max_length, self._job.on_overlong
        detail = renderer.detail(example)
        length = _longest(detail.views)
        views = detail.views
        if length > limit and policy == "cut_turns":
            while _longest(detail.views) > limit:
                kept = _without_last_turn(example.messages)
                if not any(message.role == "assistant" and message.weight for message in kept):
                    raise TooLong(length, limit)
                example = replace(example, messages=kept)
                detail = renderer.detail(example)
            changed.append("cut-turns")
            views = detail.views
        elif length > limit and policy == "cut":
            views = tuple(cut for view in views if any((cut := _cut(view, limit)).rendered.trained))
            if not views:
                raise RowRefused("no-trained-token", f"the first {limit} tokens hold no answer")
            changed.append("cut")
        elif length > limit:
            raise TooLong(length, limit)
        changed += detail.changed
        return example, views


class TooLong(RowRefused):
    """Carries the length in tokens where it was counted, for the histogram."""

    def __init__(self, length: int | None, limit: int, hint: str = ""):
        super().__init__("too-long", hint or f"{length:,} tokens, max_length is {limit:,}")
        self.length = length


def num_chars(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)


def _without_last_turn(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Up to the answer before the last one; empty when there is none."""
    end = len(messages) - 1
    while end > 0 and messages[end - 1].role != "assistant":
        end -= 1
    return tuple(messages[:end])


def _longest(views: Sequence[RenderedView]) -> int:
    return max(len(view.rendered.tokens) for view in views)


def _cut(view: RenderedView, limit: int) -> RenderedView:
    return replace(view, rendered=Rendered(view.rendered.tokens[:limit], view.rendered.trained[:limit]))
