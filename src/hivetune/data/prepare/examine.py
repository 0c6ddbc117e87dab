"""The examination of one row: read, check, redact, render, hash. What needs other rows comes later (decide.py)."""

import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from hivetune.config import DataConfig
from hivetune.data.checks.lessons import group_hash, lesson_hashes, lesson_of, packed_lesson, question, read_hash
from hivetune.data.checks.redact import apply_policy
from hivetune.data.checks.rules import CHECKS, check_messages, control_token_check, has_mojibake
from hivetune.data.intake.interactions import is_forgotten, is_forgotten_raw, row_hash, storable
from hivetune.data.judged import is_small_edit, with_worse
from hivetune.data.prepare.near import sketch, sketch_bytes
from hivetune.data.prepare.understand import as_text
from hivetune.data.raw import RawRow
from hivetune.data.read import ExaminedRow, Note, content_id, judged_hash, parse_row, read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.snapshot import messages_json
from hivetune.data.time_limit import TimeLimit
from hivetune.records import Example, Message, Rendered

ROW_LIMIT_S = 20.0  # of processor time; a row of 1 MB takes 0.5 s on a slow core
BAD_MARK = 0x5F0BAD5F0BAD5F0B  # makes the hash of a bad answer differ from the same answer called good


class RowSettings(NamedTuple):
    """The settings that the examination of a row depends on. `learn`: the kinds of rows to learn from. `forgotten`: the
    entries of the table `forgotten` in hive.db."""

    data: DataConfig
    learn: Sequence[str]
    max_length: int
    model_folder: Path | None
    forgotten: frozenset[tuple[str, str]] = frozenset()  # (kind, hash)


# The columns of the tables `rows` and `bodies` (work.py) that the examination fills.
ROW_COLUMNS = (
    *("source", "fate", "hint", "length", "layout", "changed", "notes", "missing", "late", "id", "agent", "category"),
    *("session", "user", "time", "answered_by", "maker", "lesson", "approved", "hash64", "read64", "question64"),
    *("session64", "owner64", "lesson64", "judged64", "worse64", "num_tokens", "trained"),
)
BODY_COLUMNS = (
    *("interaction_id", "messages", "tools", "checker", "tokens", "mask", "views"),
    *("worse", "worse_tokens", "worse_mask"),
)


class Examined(NamedTuple):
    """The result of one row: its values for the tables `rows` and `bodies` (work.py), the hashes of its lessons except
    the last, and its sketch (near.py) and lesson for the search for near copies, both empty if it has none. A
    refused row has only some of these values."""

    row: tuple[Any, ...]
    body: tuple[Any, ...] = ()
    earlier: Sequence[int] = ()
    sketch: bytes = b""
    lesson: bytes = b""


class Results(NamedTuple):
    """The results of a batch as work.py stores them: the rows of its tables, each with its number, and for each row a
    sketch and a lesson, which ends in `lessons` at its place in `ends`.
    """

    rows: list[tuple[Any, ...]]
    bodies: list[tuple[Any, ...]]
    earlier: list[tuple[int, int]]
    sketches: bytes
    lessons: bytes
    ends: list[int]


class TooLong(RowRefused):
    """The refusal of a row with more tokens than max_length. `length`: its number of tokens, for the histogram."""

    def __init__(self, length: int, limit: int):
        remedy = "raise it, or divide conversations: --set data.on_overlong=split"
        super().__init__("too-long", f"longer than the {limit:,} tokens of max_length: {remedy}")
        self.length = length


class Examiner:
    """The examination of rows under one set of settings; its renderer is loaded once."""

    def __init__(self, settings: RowSettings):
        self._settings = settings
        self._renderer = load_renderer(settings.model_folder) if settings.model_folder is not None else None
        checks = [control_token_check(self._renderer.control_tokens)] if self._renderer is not None else []
        self._checks = (*CHECKS, *checks)

    def examine(self, batch: Sequence[RawRow], first: int) -> Results:
        """Return the results of rows, whose numbers begin with `first`."""
        rows: Sequence[Any] = batch
        # All rows pass one stage before the next one begins, so that its code and tables stay in the caches. Measured
        # with 64 rows of 500 bytes: 310 us a row, 390 if each row passes all stages at once.
        for stage in (self._read, self._clean, self._render, self._result):
            rows = [_run(stage, row) for row in rows]
        examined: list[tuple[int, Examined]] = list(enumerate(rows, first))
        threshold = self._settings.data.near_duplicates
        no_sketch = bytes(sketch_bytes(threshold)) if threshold else b""
        return Results(
            [(n, *one.row) for n, one in examined],
            [(n, *one.body) for n, one in examined if one.body],
            [(lesson, n) for n, one in examined for lesson in one.earlier],
            b"".join([one.sketch or no_sketch for _, one in examined]),
            b"".join([one.lesson for _, one in examined]),
            list(accumulate(len(one.lesson) for _, one in examined)),
        )

    def _read(self, raw: RawRow) -> ExaminedRow:
        forgotten = self._settings.forgotten
        name = raw.source.rpartition(":")[0]
        try:
            row = read_example(raw, self._settings.data.columns, pairs="pairs" in self._settings.learn)
        except RowRefused:
            if forgotten and is_forgotten_raw(forgotten, (name, os.path.realpath(name)), raw.payload):
                raise RowRefused("forgotten") from None
            raise
        if forgotten:  # the store has removed such rows, but files may still hold them
            content = row_hash(parse_row(raw.payload))
            who = {"session": row.example.session, "user": row.example.user, "content": content}
            if is_forgotten(forgotten, (name, os.path.realpath(name)), **who):
                raise RowRefused("forgotten")
        check_messages(row.example.messages, self._checks)
        if has_mojibake(row.example.messages):
            row.changed += ("mojibake",)
        return row

    def _clean(self, row: ExaminedRow) -> ExaminedRow:
        """Return the row with secrets and personal data redacted, the policies applied and the system prompt added."""
        settings = self._settings
        example, notes = apply_policy(row.example, settings.data.on_private)
        example = _apply_policies(replace(example, id=content_id(example.messages, example.tools)), settings)
        prompt = settings.data.system_prompts.get(example.agent) if example.agent else None
        if prompt is not None and example.messages[0].role == "user":
            front = replace(example, messages=(Message("system", prompt),), tools=(), checker=None)
            front, more = apply_policy(front, settings.data.on_private)
            example = replace(example, messages=(*front.messages, *example.messages))
            notes += more
        row.example, row.notes = example, notes
        return row

    def _render(self, row: ExaminedRow) -> ExaminedRow:
        example, more, row.worse = self._with_worse(row.example)
        row.notes += more
        changed = [*row.changed, *(reason for reason, _ in row.notes)]
        if self._renderer is not None:
            row.views = self._fitted(self._renderer, example, changed)
            if example.lesson != "sft":
                row.views = row.views[-1:]  # only the last answer was judged
            answers = sum(message.role == "assistant" and message.weight > 0 for message in example.messages)
            left_out = answers - sum(len(view.answers) for view in row.views)
            if left_out and "shortened" in changed and self._settings.data.on_overlong == "split":
                told = (
                    f"{left_out} of {answers} answers are left out, each too long with its question: raise max_length"
                )
                row.notes += (("shortened", told),)
        row.example, row.changed = example, tuple(dict.fromkeys(changed))
        return row

    def _with_worse(self, example: Example) -> tuple[Example, tuple[Note, ...], Rendered | None]:
        """Return the row, notes and the rendered worse answer; None, and the row without its worse answer, if that
        can't be used.
        """
        if example.worse is None:
            return example, (), None
        if is_small_edit(example.messages[-1], example.worse):
            return replace(example, worse=None), (("worse-left-out", "the better answer is learned alone"),), None
        try:
            bad = replace(example, messages=(*example.messages[:-1], example.worse), worse=None)
            check_messages(bad.messages, self._checks)
            bad, notes = apply_policy(bad, self._settings.data.on_private)
            view = self._fitted(self._renderer, bad, [])[-1] if self._renderer is not None else None
        except RowRefused as refused:
            note = f"the worse answer is not used: {refused.reason}: {refused.hint}"
            return replace(example, worse=None), (("worse-left-out", note),), None
        return replace(example, worse=bad.messages[-1]), notes, view

    def _fitted(self, renderer: Renderer, example: Example, changed: list[str]) -> tuple[Rendered, ...]:
        """Return the row's views of at most max_length tokens, and append to `changed`. Raise RowRefused."""
        limit, policy = self._settings.max_length, self._settings.data.on_overlong
        views, notes = renderer.render_and_note(example)
        length = _longest(views)
        if length > limit and policy == "split" and example.lesson == "sft" and example.worse is None:
            views = tuple(self._parts(renderer, example, 0, len(example.messages)))
            if not views:
                raise TooLong(length, limit)
            changed.append("shortened")
        elif length > limit and policy == "cut":
            cut = [replace(view, tokens=view.tokens[:limit], trained=view.trained[:limit]) for view in views]
            views = tuple(view for view in cut if any(view.trained))
            if not views:
                raise RowRefused("no-trained-token", f"the first {limit} tokens contain no answer: raise max_length")
            changed.append("shortened")
        elif length > limit:
            raise TooLong(length, limit)
        changed += notes
        return views

    def _parts(self, renderer: Renderer, example: Example, first: int, end: int) -> Iterator[Rendered]:
        """Yield the views of messages `first` to `end` after the system prompt, halved until each fits. A half
        begins with a question: one that does not fit with its answer is left out.
        """
        messages = example.messages
        skipped = max(first - 1, 0) if messages[0].role == "system" else first
        part = (*messages[: first - skipped], *messages[first:end])
        try:
            views = renderer.render(replace(example, messages=part))
        except RowRefused as refused:
            if refused.reason != "no-trained-token":  # as of a part with answers of weight 0 alone
                raise
            return
        if _longest(views) <= self._settings.max_length:
            yield from (replace(view, skipped=skipped) for view in views)
            return
        # Not behind the end of an answer alone: what a user says in several messages is one question.
        starts = [
            i for i in range(first + 1, end) if messages[i].role == "user" and messages[i - 1].role == "assistant"
        ]
        if starts:
            middle = min(starts, key=lambda i: abs(2 * i - first - end))
            yield from self._parts(renderer, example, first, middle)
            yield from self._parts(renderer, example, middle, end)

    def _result(self, row: ExaminedRow) -> Examined:
        """Return the columns of an examined row for work.sqlite, with its hashes."""
        example, views, worse = row.example, row.views, with_worse(row.example)
        is_bad = example.lesson == "failure"
        lessons = array("Q") if is_bad else lesson_hashes(example.messages, example.tools)
        hash64 = int(example.id[:16], 16)
        # Good answers are compared with failures alone; the hash takes a fifteenth of a row's time.
        is_compared = example.lesson != "sft" or "failures" in self._settings.learn
        owner = (
            f"client:{example.client}" if example.client is not None else f"user:{example.user}" if example.user else ""
        )
        values = {
            "source": storable(example.source),
            "fate": "train",
            "layout": row.layout,
            "changed": ",".join(row.changed) or None,
            "notes": _json(row.notes),
            "missing": ",".join(row.missing) or None,
            "late": _json({storable(name): storable(as_text(value)) for name, value in row.late}),
            "id": example.id,
            "agent": example.agent,
            "category": example.category,
            "session": example.session,
            "user": example.user,
            "time": example.time,
            "answered_by": example.answered_by,
            "maker": example.maker,
            "lesson": example.lesson,
            "approved": int(is_approved(example)),
            "hash64": _signed(hash64 ^ BAD_MARK if is_bad else hash64),
            "read64": _signed(read_hash(example.messages)),
            "question64": _signed(group_hash("question:" + question(example.messages))),
            "session64": _signed(group_hash(f"session:{example.session}")) if example.session else None,
            "owner64": _signed(group_hash(owner)) if owner else None,
            "lesson64": _signed(lessons[-1]) if lessons else None,
            "judged64": _signed(judged_hash(example.messages, example.tools)) if is_compared else None,
            "worse64": None if worse is None else _signed(judged_hash(worse, example.tools)),
            "length": _longest(views) if views else sum(len(message.content) for message in example.messages),
            "num_tokens": sum(len(view.tokens) for view in views) if views else None,
            "trained": sum(view.trained.count(1) for view in views) if views else None,
        }
        sent = self._renderer.as_sent(example.messages, example.tools) if self._renderer else example.messages
        sizes = [[len(view.tokens), view.skipped, view.num_messages, view.answers] for view in views]
        body = {
            "interaction_id": row.raw.interaction_id,
            "messages": messages_json(sent),
            "tools": _json([dict(tool) for tool in example.tools]),
            "checker": _json(example.checker),
            "tokens": b"".join([array("I", view.tokens).tobytes() for view in views]) if views else None,
            "mask": b"".join([view.trained for view in views]) if views else None,
            "views": json.dumps(sizes) if len(sizes) > 1 or "shortened" in row.changed else None,
            "worse": None if worse is None else messages_json(worse),
            "worse_tokens": array("I", row.worse.tokens).tobytes() if row.worse else None,
            "worse_mask": row.worse.trained if row.worse else None,
        }
        is_cut = "shortened" in row.changed and self._settings.data.on_overlong == "cut"
        earlier = [] if is_cut else [_signed(lesson) for lesson in lessons[:-1]]
        columns = tuple(map(values.get, ROW_COLUMNS)), tuple(map(body.get, BODY_COLUMNS))
        if not self._settings.data.near_duplicates:
            return Examined(*columns, earlier)
        lesson = lesson_of(example.messages, example.tools)
        if is_bad:  # no copy of a good answer
            lesson = lesson._replace(calls=(*lesson.calls, example.lesson))
        return Examined(*columns, earlier, sketch(lesson, self._settings.data.near_duplicates), packed_lesson(lesson))


def _run(stage: Callable[[Any], Any], row: Any) -> Any:
    """Return the result of a stage; for a refused row the fields known so far."""
    if isinstance(row, Examined):
        return row
    try:
        with TimeLimit(ROW_LIMIT_S, lambda: RowRefused("too-costly")):
            return stage(row)
    except RowRefused as error:
        refused = error
    except RecursionError:  # JSON, Jinja and our own functions reach it at about the same depth
        refused = RowRefused("bad-json", "the JSON is nested too deeply: flatten the row")
    source = row.source if isinstance(row, RawRow) else row.raw.source
    length = refused.length if isinstance(refused, TooLong) else None
    values = {"source": storable(source), "fate": refused.reason, "hint": storable(refused.hint), "length": length}
    return Examined(tuple(map(values.get, ROW_COLUMNS)))


def _longest(views: Sequence[Rendered]) -> int:
    return max(len(view.tokens) for view in views)


def _apply_policies(example: Example, settings: RowSettings) -> Example:
    """Return the row as the policies of the config allow it. Raise RowRefused."""
    if example.lesson == "failure" and "failed" in settings.data.also_train:
        example = replace(example, lesson="sft")
    elif example.lesson == "failure" and "failures" not in settings.learn:
        raise RowRefused("failed")
    needed = {"sft": "sft", "correction": "corrections"}.get(example.lesson)
    if needed is not None and needed not in settings.learn:
        raise RowRefused("not-learned", f"learn.use does not name {needed}: add it to learn from such rows")
    if example.untrusted and "untrusted" not in settings.data.also_train:
        raise RowRefused("untrusted")
    is_own_answer = example.answered_by is not None and example.lesson == "sft"
    if is_own_answer and not is_approved(example) and "own_answers" not in settings.data.also_train:
        raise RowRefused("own-answer")
    if example.worse is not None and "pairs" not in settings.learn:
        return replace(example, worse=None)  # a correction is a target in any case
    return example


def is_approved(example: Example) -> bool:
    """Return whether the answer was rated good: by its success, a rating, or as the better one of two."""
    liked = example.feedback is not None and example.feedback > 0
    return example.success is True or liked or example.lesson in ("correction", "pair")


def _json(value: object) -> str | None:
    return json.dumps(value) if value else None


def _signed(value: int) -> int:
    """Return 64 bits as SQLite stores them."""
    return value - (1 << 64) if value >= 1 << 63 else value
