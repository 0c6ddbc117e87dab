"""What each file was understood as, decided and shown on a sample of its rows: where they are, what is asked in them,
what is answered, and what is left out.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from hivetune.base.disk import scratch_folder
from hivetune.data.checks.placeholders import share_few_labels
from hivetune.data.checks.redact.apply import PERSONAL, SECRETS, redact_value
from hivetune.data.intake.files import Chunk, Inputs, plan_inputs
from hivetune.data.judged.failures import most_tokens_in
from hivetune.data.pieces.markup import without_markup
from hivetune.data.pieces.said import texts_in
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.asking.advice import Line, advised, as_option, lines_for
from hivetune.data.rows.find.leaves import nodes
from hivetune.data.rows.find.names import part_of, words
from hivetune.data.rows.find.nest import RowPlace, are_unread, place_name, place_of_rows, places, rows_at, with_choices
from hivetune.data.rows.find.per_file import (
    are_prompts,
    cut_length,
    doubted_columns,
    label_columns,
    pair_columns,
    readings,
)
from hivetune.data.rows.layouts.columns import looks_like_content
from hivetune.data.rows.read import RawRow, parse_row, read_example, read_rows
from hivetune.records import Example, Message

FIRST_ROWS = 30
FIRST_BYTES = 4 << 20
LABEL_ROWS, LABEL_BYTES = 400, 1 << 20  # looked at to see whether answers are classes
MAX_PATHS = 6  # shown of each kind
PREVIEW_CHARS, LOOKED_AT_CHARS = 70, 2000  # of a text that is shown, and that is looked through for secrets
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
_BESIDE = frozenset(("chunk", "chunks", "source", "sources", "tool", "tools", "step", "steps", "span", "spans"))
TOLD_KINDS = ("question", "answer", "system", "tools", "left_out")


def rows_of_files(paths: str | Sequence[str], columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[RawRow]:
    """Every row of these files, as `data check` finds them. Raises what `plan_inputs` does."""
    with scratch_folder() as spill:
        for chunk in place_rows(plan_inputs(paths, spill), columns).chunks:
            yield from read_rows(chunk)


def example_of(raw: RawRow) -> Example:
    """One of these rows as an Example without its id. Raises RowRefused, also where it is nested too deep."""
    try:
        return read_example(raw, NO_COLUMNS).example
    except RecursionError:
        raise RowRefused("too-deep") from None


def place_rows(inputs: Inputs, columns: Mapping[str, str]) -> Inputs:
    """The inputs with the place of their rows, where the records of a file hold many, and with the line that would read
    a file's rows where nothing reads most of them.
    """
    found = {name: _looked_at(list(_records(chunks)), columns) for name, chunks in _by_file(inputs.chunks)}
    seen = {one.name: found.get(one.name, _Seen()) for one in inputs.chunks}
    return replace(inputs, chunks=tuple(replace(one, **seen[one.name]._asdict()) for one in inputs.chunks))


class _Seen(NamedTuple):
    """What the first rows of a file told: as in Chunk."""

    inside: RowPlace = ()
    line: str | None = None
    labels: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()
    prompts: bool = False
    doubted: tuple[str, ...] = ()
    cut_chars: int = 0
    most_tokens: int = 0


def _looked_at(records: Sequence[Any], columns: Mapping[str, str]) -> _Seen:
    place = with_choices(records, place_of_rows(records, columns), columns)
    if columns:
        return _Seen(place)
    rows = rows_at(records, place) if place else records
    lines = [] if place else unread_lines(records)
    line = advised(lines[0]) if lines else ""
    labels, pair = label_columns(rows), pair_columns(rows)
    read = readings(rows, labels, pair)
    doubted, most = doubted_columns(read), most_tokens_in(rows)
    return _Seen(place, line, labels, pair, are_prompts(rows), doubted, cut_length(read), most)


def unread_lines(records: Sequence[Any]) -> list[Line]:
    """What would read the rows of a file, if nothing reads most of its records; rows inside records too."""
    objects = [record for record in records if isinstance(record, dict)]
    if not objects or not are_unread(objects):
        return []
    lines = lines_for(objects)
    for place in places(objects) if not lines else ():
        beside = any(part_of(key) == "given" or _BESIDE & set(words(key)) for key in place)
        if not beside and (rows := rows_at(objects, place)):
            lines = lines_for(rows, inside=True)
            lines = [line for line in lines if place_of_rows(objects, line.columns) == place]
        if lines:
            break
    return lines


def understood(inputs: Inputs, columns: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """For each file and each layout in its first rows: `layout`, `rows` (of the sample), `rows_at`, and the paths of
    `question`, `answer`, `system`, `tools` and of written text that is `left_out`.
    """
    return {name: _of_file(chunks, columns) for name, chunks in _by_file(inputs.chunks)}


def unclear(inputs: Inputs, columns: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """For each file most of whose first rows nothing reads: the lines that would, the likeliest first, each with the
    question and the answer of a row and how many rows of the sample it reads.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name, chunks in _by_file(inputs.chunks) if not columns else ():
        records = list(_records(chunks)) if chunks[0].line else []
        lines = [
            {"line": as_option(line.columns), "rows": line.read, "said": advised(line) if line.guessed else ""}
            | {"question": _preview(line.question), "answer": _preview(line.answer)}
            for line in unread_lines(records)
        ]
        found |= {name: lines} if lines else {}
    return found


def _preview(text: str) -> str:
    """The beginning of a text on one line, without secrets and personal data."""
    clean: Any = redact_value(redact_value(" ".join(text[:LOOKED_AT_CHARS].split()), SECRETS), PERSONAL)
    return clean if len(clean) <= PREVIEW_CHARS else f"{clean[: PREVIEW_CHARS - 3]}..."


def _of_file(chunks: Sequence[Chunk], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    counts: Counter[str] = Counter()
    paths: dict[str, dict[str, Counter[str]]] = {}
    for raw in _sample(chunks):
        try:
            read = read_example(raw, columns)
            traced = list(_traced(parse_row(raw.payload), read.example))
        except (RowRefused, RecursionError):
            continue  # the checks say why; or it holds more than anybody would look through
        counts[read.layout] += 1
        found = paths.setdefault(read.layout, {kind: Counter() for kind in TOLD_KINDS})
        for kind, path in traced:
            found[kind][path] += 1
    for some in paths.values():  # what is read of one row and left out of another (a last turn) is read
        for path in [path for path in some["left_out"] if any(path in some[kind] for kind in _KINDS.values())]:
            del some["left_out"][path]
    at = place_name(chunks[0].inside)
    return [
        {
            "layout": layout,
            "rows": count,
            "rows_at": at,
            **{kind: [path for path, _ in some.most_common(MAX_PATHS)] for kind, some in paths[layout].items()},
        }
        for layout, count in counts.most_common()
    ]


_KINDS = {"user": "question", "assistant": "answer", "system": "system", "tool": "question"}


def _traced(row: Mapping[str, Any], example: Example) -> Iterator[tuple[str, str]]:
    """(kind, path) of each text of a row: where it stands in the conversation, or that it does not."""
    called = {text for m in example.messages for call in m.tool_calls for text in texts_in(call["function"])}
    offered = set(texts_in([dict(tool) for tool in example.tools]))
    whole = {message.content.strip(): _KINDS[message.role] for message in reversed(example.messages)}
    seen: set[tuple[str, str]] = set()
    unread: dict[str, str] = {}
    for path, value in nodes(row):
        if not isinstance(value, str) or not value.strip():
            continue
        forms = (value.strip(), without_markup(value))
        kind = next((kind for text in forms if (kind := whole.get(text))), None)
        kind = kind or next((kind for text in forms if (kind := _kind_within(text, example.messages))), None)
        if kind is None and value in called:
            kind = "answer"
        if kind is None and not looks_like_content(value):
            continue
        kind = kind or ("tools" if value in offered else "left_out")
        name = ".".join(path).replace(".[]", "[]")
        seen.add((kind, name))
        unread |= {name: value} if kind == "left_out" else {}
    around = set(_around(unread, {kind for kind, _ in seen}, example.messages))
    yield from sorted((seen | around) - {("left_out", name) for _, name in around})


def _around(left_out: Mapping[str, str], told: set[str], messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """(kind, path) of texts in which messages stand that no other text holds: marks of a template were taken off."""
    for message in messages:
        kind = _KINDS[message.role]
        if kind not in told and looks_like_content(message.content):
            yield from ((kind, name) for name, text in left_out.items() if message.content.strip() in text)


def _kind_within(text: str, messages: Sequence[Message]) -> str | None:
    """Of written text that stands within a message; thoughts are learned too."""
    if not looks_like_content(text):
        return None
    written = json.dumps(text, ensure_ascii=False)[1:-1]  # as it stands in a tool's result that is an object
    for message in messages:
        if text in message.content or text in (message.reasoning or "") or written in message.content:
            return _KINDS[message.role]
    return None


def shares_few_labels(chunk: Chunk, columns: Mapping[str, str]) -> bool:
    """Whether many of the first rows of a chunk's file share few answers, as in a file of texts and their classes."""
    if chunk.kind not in ("lines", "numbered"):
        return False
    answers = []
    first = replace(chunk, start=0, first=1, end=LABEL_BYTES, last=False)
    for raw in itertools.islice(read_rows(first), LABEL_ROWS):
        try:
            answers.append(read_example(raw, columns).example.messages[-1].content)
        except (RowRefused, RecursionError):
            continue  # broken, or cut by the end of the sample
    return share_few_labels(answers)


def _by_file(chunks: Iterable[Chunk]) -> Iterator[tuple[str, list[Chunk]]]:
    found: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        if chunk.kind in ("lines", "numbered"):
            found.setdefault(chunk.name, []).append(chunk)
    yield from found.items()


def _records(chunks: Sequence[Chunk]) -> Iterator[Any]:
    for raw in _sample(chunks):
        try:
            yield json.loads(raw.payload)
        except (ValueError, RecursionError):
            yield None  # broken: no row, wherever rows are


def _sample(chunks: Sequence[Chunk]) -> list[RawRow]:
    """The first rows of a file, fewer where they are large."""
    sample: list[RawRow] = []
    size = 0
    for raw in itertools.islice(itertools.chain.from_iterable(map(read_rows, chunks)), FIRST_ROWS):
        if raw.problem is not None:
            continue
        sample.append(raw)
        size += len(raw.payload)
        if size > FIRST_BYTES:
            break
    return sample
