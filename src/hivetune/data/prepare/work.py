"""One chunk of rows from bytes to tokens: read, check, redact, render, sign; the result is one SQLite file.

Run in this process for small inputs, else in children: `python -m hivetune.data.prepare.work`, a job on the first line
of standard input, then one chunk a line; answers a line: `so_far` now and then, `rows` when a chunk is done. A child
ends when its parent closes the pipe.
"""

import contextlib
import functools
import gc
import json
import os
import sqlite3
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.data.checks.dedupe import sketch
from hivetune.data.checks.lessons import lesson_hashes
from hivetune.data.checks.parts import leave_parts_out
from hivetune.data.checks.placeholders import refuse_placeholder
from hivetune.data.checks.policies import apply_policies, is_vouched, keep_forgotten_out, source_names
from hivetune.data.checks.redact.apply import ADVICE, PERSONAL, SECRETS, Policy, apply_policy
from hivetune.data.checks.rules import CHECKS, Messages, check_length, check_messages, control_token_check
from hivetune.data.intake.files import Chunk
from hivetune.data.intake.interactions import is_forgotten_raw
from hivetune.data.judged.answers import is_small_edit, with_worse
from hivetune.data.prepare.split import tie_hashes
from hivetune.data.prepare.understand import shares_few_labels
from hivetune.data.reasons import RowRefused
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import RenderedView, Renderer
from hivetune.data.rows.read import RawRow, content_id, judged_hash, read_example, read_rows
from hivetune.data.snapshot import messages_json
from hivetune.data.time_limit import can_limit_time, row_time_limit
from hivetune.records import Example, Message, Rendered

_BATCH_ROWS = 500
# Rows leave few cycles behind; looking for them after every 700 objects costs 6 % of the time.
GC_THRESHOLD = 50_000
_SCHEMA = """
PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-2000;
CREATE TABLE rows (
  n INTEGER PRIMARY KEY, source TEXT NOT NULL, layout TEXT, reason TEXT, hint TEXT, changed TEXT,
  id TEXT, hash64 INTEGER,            -- of the content
  read64 INTEGER, question64 INTEGER, session64 INTEGER, user64 INTEGER,  -- what ties the row to others; 0: names none
  lesson64 INTEGER, earlier BLOB,     -- its last lesson, and those before it (array "Q"); lessons.py
  length INTEGER,                     -- of its longest view
  num_tokens INTEGER, trained INTEGER,  -- of all its views
  agent TEXT, category TEXT, session TEXT, user TEXT, time REAL, answered_by TEXT,
  maker TEXT,                         -- of a synthetic row
  vouched INTEGER,                    -- 1 where somebody or something called the answer good
  lesson TEXT, judged64 INTEGER, worse64 INTEGER,  -- of the last answer, and of a worse one, with all before them
  notes TEXT                          -- what was changed where, as JSON: [[reason, "GitHub token in the answer"], ...]
);
CREATE TABLE bodies (
  n INTEGER PRIMARY KEY, interaction_id TEXT, messages TEXT, tools TEXT, checker TEXT,
  tokens BLOB, mask BLOB,             -- of all its views, one after the other
  views TEXT,                         -- of rows with several: JSON [[tokens, messages, [answers]], ...]
  worse TEXT, worse_tokens BLOB, worse_mask BLOB,  -- messages, tokens and mask with the worse answer
  raw BLOB
);
"""
ROW_COLUMNS, BODY_COLUMNS = 29, 12
BAD_MARK = 0x5F0BAD5F0BAD5F0B  # a bad answer is no copy of a good one
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


@dataclass(frozen=True, slots=True)
class ExaminedRow:
    """A row after all checks that need no other row. `views` is empty without a model."""

    example: Example
    layout: str
    views: tuple[RenderedView, ...]
    changed: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    worse: RenderedView | None = None


class Worker:
    """Examines rows under one job."""

    def __init__(self, job: ChunkJob):
        self._job = job
        self._renderer: Renderer | None = load_renderer(Path(job.model_folder)) if job.model_folder else None
        checks: list[Callable[[Messages], None]] = list(CHECKS)
        if self._renderer is None:
            checks.insert(0, check_length)  # before anything reads the text
        else:
            checks.append(control_token_check(self._renderer.control_tokens))
        self._checks = tuple(checks)
        self._timed = can_limit_time()
        self._forgotten = frozenset((kind, value) for kind, value in job.forgotten)
        self._few_labels: Callable[[], bool] = lambda: False  # of the chunk's file

    def run(self, chunk: Chunk, out: Path, told: Callable[[int], None] = lambda rows: None) -> int:
        """Examine every row of `chunk` and write `out` (and `out` + .sketches), whole or not at all. `told`: how many
        rows of it are examined, now and then."""
        temporary = out.with_name(f".{out.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._few_labels = functools.cache(lambda: shares_few_labels(chunk, self._job.columns))
        database = sqlite3.connect(temporary, isolation_level=None)
        count = 0
        sketches = open(f"{temporary}.sketches", "wb") if self._job.near else contextlib.nullcontext(None)  # noqa: SIM115
        with contextlib.closing(database), sketches as sink:
            database.executescript(_SCHEMA)
            rows: list[tuple[Any, ...]] = []
            bodies: list[tuple[Any, ...]] = []
            for raw in read_rows(chunk):
                row, body, sketched = self._one(raw)
                rows.append((count, *row))
                bodies.append((count, *body))
                if sink is not None and sketched:
                    sink.write(sketched)
                count += 1
                if len(rows) >= _BATCH_ROWS:
                    _insert(database, rows, bodies)
                    told(count)
            _insert(database, rows, bodies)
        if self._job.near:
            os.rename(f"{temporary}.sketches", f"{out}.sketches")
        os.rename(temporary, out)
        return count

    def _one(self, raw: RawRow) -> tuple[tuple[Any, ...], tuple[Any, ...], bytes]:
        """The two table rows, without their number, and the sketch of a row that may be used."""
        source = _storable(raw.source)
        try:
            found = self._examine_safely(raw)
        except RowRefused as error:
            length = error.length if isinstance(error, TooLong) else None
            refused = (source, None, error.reason, _storable(error.hint), *[None] * 9, length, *[None] * 14)
            return refused, (*[None] * (BODY_COLUMNS - 2), raw.payload), b""
        example, rendered = found.example, [view.rendered for view in found.views]
        bad, worse = example.lesson == "failure", with_worse(example)
        lessons = array("Q") if bad else lesson_hashes(example.messages, example.tools)
        hash64 = int(example.id[:16], 16)
        row = (
            source,
            found.layout,
            None,
            None,
            ",".join(found.changed) or None,
            example.id,
            _signed(hash64 ^ BAD_MARK if bad else hash64),
            *map(_signed, tie_hashes(example)),
            _signed(lessons[-1]) if lessons else None,
            lessons[:-1].tobytes() if len(lessons) > 1 and "cut" not in found.changed else None,
            max((len(r.tokens) for r in rendered), default=_num_chars(example.messages)),
            sum(len(r.tokens) for r in rendered) if rendered else None,
            sum(r.trained.count(1) for r in rendered) if rendered else None,
            example.agent,
            example.category,
            example.session,
            example.user,
            example.time,
            example.answered_by,
            example.maker,
            int(is_vouched(example)),
            example.lesson,
            _signed(judged_hash(example.messages, example.tools)),
            None if worse is None else _signed(judged_hash(worse, example.tools)),
            _json(found.notes),
        )
        return row, self._body(raw, found), b"" if not self._job.near else sketch(example.messages)

    def _body(self, raw: RawRow, found: ExaminedRow) -> tuple[Any, ...]:
        example, rendered, worse = found.example, [view.rendered for view in found.views], with_worse(found.example)
        return (
            raw.interaction_id,
            messages_json(example.messages),
            _json([dict(tool) for tool in example.tools]),
            _json(example.checker),
            b"".join(array("I", r.tokens).tobytes() for r in rendered) if rendered else None,
            b"".join(r.trained for r in rendered) if rendered else None,
            _views_json(found.views),
            None if worse is None else messages_json(worse),
            array("I", found.worse.rendered.tokens).tobytes() if found.worse else None,
            found.worse.rendered.trained if found.worse else None,
            raw.payload if self._job.keep_raw else None,
        )

    def _examine_safely(self, raw: RawRow) -> ExaminedRow:
        try:
            with row_time_limit() if self._timed else contextlib.nullcontext():
                return self.examine(raw)
        except RecursionError:  # JSON, Jinja and our own walks all have their limits near each other
            raise RowRefused("too-deep") from None

    def examine(self, raw: RawRow) -> ExaminedRow:
        """One row through everything that needs no other row. Raises RowRefused."""
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
        example, notes = self._redacted(example)
        example = replace(example, id=content_id(example.messages, example.tools))
        example = apply_policies(example, job, read.failed_outside)
        shortened += refuse_placeholder(example.messages, self._few_labels)  # a failed row says so itself
        prompt = job.system_prompts.get(example.agent) if example.agent else None
        if prompt is not None and example.messages[0].role == "user":
            front = replace(example, messages=(Message("system", prompt),), tools=(), checker=None)
            front, more = self._redacted(front)
            example = replace(example, messages=(*front.messages, *example.messages))
            notes += more
        example, more, worse = self._with_worse(example)
        notes += more
        changed = [*read.changed, *shortened, *dict.fromkeys(reason for reason, _ in notes)]
        if self._renderer is None:
            return ExaminedRow(example, read.layout, (), tuple(changed), notes)
        example, views = self._fitted(self._renderer, example, changed)
        if example.lesson != "sft":
            views = views[-1:]  # only the last answer was judged
        return ExaminedRow(example, read.layout, views, tuple(dict.fromkeys(changed)), notes, worse)

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
        limit, size = self._job.max_length, _num_chars(example.messages)
        if size <= limit * SURE_CHARS or size <= limit * self._renderer.longest_token_chars:
            return example, []
        longest = limit * self._renderer.longest_token_chars
        kept = example.messages
        while self._job.on_overlong == "cut_turns" and kept and _num_chars(kept) > longest:
            kept = _without_last_turn(kept)
        if _num_chars(kept) > longest or not kept:
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
                if not kept:
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


def _num_chars(messages: Sequence[Message]) -> int:
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


def _views_json(views: Sequence[RenderedView]) -> str | None:
    """What splits the tokens of a row again; None where there is nothing to split."""
    if len(views) < 2:
        return None
    return json.dumps([[len(view.rendered.tokens), view.num_messages, view.answers] for view in views])


def _json(value: object) -> str | None:
    return json.dumps(value) if value else None


def _storable(text: str) -> str:
    """File names and hints may hold bytes that are no UTF-8; SQLite takes none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _insert(database: sqlite3.Connection, rows: list[tuple[Any, ...]], bodies: list[tuple[Any, ...]]) -> None:
    database.execute("BEGIN")
    database.executemany(f"INSERT INTO rows VALUES ({','.join('?' * ROW_COLUMNS)})", rows)
    database.executemany(f"INSERT INTO bodies VALUES ({','.join('?' * BODY_COLUMNS)})", bodies)
    database.execute("COMMIT")
    rows.clear()
    bodies.clear()


def _serve() -> None:
    """The child: jobs in, answers out, nothing else on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    worker = Worker(ChunkJob(**json.loads(sys.stdin.readline())))

    def tell(answer: dict[str, int]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    for line in sys.stdin:
        task = json.loads(line)
        tell({"rows": worker.run(Chunk(**task["chunk"]), Path(task["out"]), lambda rows: tell({"so_far": rows}))})


if __name__ == "__main__":
    _serve()
