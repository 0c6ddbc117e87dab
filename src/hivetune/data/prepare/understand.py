"""How each file is understood, by a sample of its rows: where questions and answers are, and what is left out."""

import itertools
import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hivetune.base.disk import scratch_folder
from hivetune.data.checks.redact.apply import PERSONAL, SECRETS, redact_value
from hivetune.data.columns import PUBLISHED, column_kind, looks_like_content
from hivetune.data.conversation import read_conversation
from hivetune.data.files.inputs import Inputs, plan_inputs
from hivetune.data.files.rows import read_rows
from hivetune.data.mapping import ROWS, maps_content
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Conversation, Row, is_json_text, parsed, texts_in
from hivetune.data.pieces.session import without_markup
from hivetune.data.raw import RawRow, Source
from hivetune.data.read import NOT_KNOWN, QUARANTINE_KEY, parse_row, read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.suggest import Suggestion, suggest
from hivetune.records import Example, Message, Progress, silent

STORE = "store"
FIRST_ROWS = 30
FIRST_BYTES = 4 << 20
MAX_PATHS = 6  # that are shown of each kind
PREVIEW_CHARS, LOOKED_AT_CHARS = 70, 2000  # of a text that are shown, and that are searched for secrets
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
MAX_NODES, MAX_DEPTH = 20_000, 24  # of a row that is searched
UNREAD_SHARE = 0.5  # of the first rows; above it a mapping is suggested
TELLING_SHARE = 0.02  # of the rows: enough equal questions with different answers to report their column
SAMPLE_ROWS = 400  # in which equal questions are searched
PATH_KINDS = ("question", "answer", "system", "tools", "left_out")
KIND_OF_ROLE = {"user": "question", "assistant": "answer", "system": "system", "tool": "question"}


def rows_of_files(paths: str | Sequence[str], columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[RawRow]:
    """Yield every row of these files as `data check` finds them. Raise as `plan_inputs` does."""
    with scratch_folder() as spill:
        yield from examine_files(plan_inputs(paths, spill), columns).rows()


def example_of(raw: RawRow) -> Example:
    """Return a row as an Example without its id. Raise RowRefused, also if it is nested too deeply."""
    try:
        return read_example(raw, NO_COLUMNS).example
    except RecursionError:
        raise RowRefused("too-deep") from None


def examine_files(inputs: Inputs, columns: Mapping[str, str], progress: Progress = silent) -> Inputs:
    """Return the inputs with findings from the first rows of each file, and a suggested mapping if most rows are
    unread.

    `progress` counts files.
    """
    sources = []
    for number, source in enumerate(inputs.sources, 1):
        is_file = source.kind != STORE
        sources.append(replace(source, **_findings(_records(source, SAMPLE_ROWS), columns)) if is_file else source)
        progress(number, len(inputs.sources))
    return replace(inputs, sources=tuple(sources))


def _findings(records: Sequence[Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of Source that follow from the first rows of a file."""
    if maps_content(columns) or ROWS in columns:
        return {"inside": columns.get(ROWS, "")}
    rows = [record for record in records if isinstance(record, dict)]
    readable: list[tuple[Row, Conversation]] = []
    unread = 0
    for row in rows:
        try:
            readable.append((row, read_conversation(row)))
        except RowRefused as refused:
            unread += refused.reason in NOT_KNOWN
        except RecursionError:
            continue  # the checks report it
    telling = telling_column(readable)
    lines = suggest(records[:FIRST_ROWS]) if telling or unread > UNREAD_SHARE * len(rows) else []
    if telling:
        lines.sort(key=lambda line: telling not in line.columns.get("prompt", "").split("+"))
    return {
        "line": f"if it is right, read it with {lines[0].option}" if lines else "",
        "telling": telling,
    }


def telling_column(read: Sequence[tuple[Row, Conversation]]) -> str:
    """Return the unread column that distinguishes equal questions with different answers, or an empty text."""
    groups: dict[tuple[tuple[str, str], ...], list[tuple[Row, str]]] = {}
    for row, conversation in read:
        if conversation.layout not in PUBLISHED:
            continue  # a program's log has more columns about calls
        question = tuple((message.role, message.content) for message in conversation.messages[:-1])
        groups.setdefault(question, []).append((row, conversation.messages[-1].content))
    alike = [group for group in groups.values() if len({answer for _, answer in group}) > 1]
    if sum(map(len, alike)) < max(2, TELLING_SHARE * len(read)):
        return ""
    return next((name for name in alike[0][0][0] if _tells(name, alike)), "")


def _tells(name: str, alike: Sequence[Sequence[tuple[Row, str]]]) -> bool:
    """Return whether a column has several values in each group, and each value one answer."""
    if column_kind(plain_name(name)) != "unknown":
        return False
    for group in alike:
        answers: dict[str, set[str]] = {}
        for row, answer in group:
            value = row.get(name)
            if not isinstance(value, str | int | float) or value == "":
                return False
            answers.setdefault(str(value), set()).add(answer)
        if len(answers) < 2 or any(len(values) > 1 for values in answers.values()):
            return False
    return True


def understood(inputs: Inputs, columns: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return for each file its layouts with their number of sampled rows, and the paths of their texts.

    The paths are those of `question`, `answer`, `system`, `tools` and of text that is `left_out`.
    """
    return {source.name: _layouts(source, columns) for source in _files(inputs)}


def unclear(inputs: Inputs, columns: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return the suggested mappings of each file that is mostly unread, the likeliest first, with examples."""
    if maps_content(columns):
        return {}
    suggested = {source.name: suggest(_records(source, FIRST_ROWS)) for source in _files(inputs) if source.line}
    return {name: list(map(suggestion_document, lines)) for name, lines in suggested.items() if lines}


def suggested_for(
    paths: str | Sequence[str], encoding: str | None, progress: Progress = silent
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Return the mappings that `unclear` suggests for these files, and the files that are read without one.

    `progress` counts files, twice.
    """
    with scratch_folder() as spill:
        inputs = plan_inputs(paths, spill, encoding=encoding, progress=progress)
        inputs = examine_files(inputs, NO_COLUMNS, progress)
        suggested = unclear(inputs, NO_COLUMNS)
        layouts = understood(inputs, NO_COLUMNS) if suggested else {}
        return suggested, [name for name, kinds in layouts.items() if kinds and name not in suggested]


def suggestion_document(line: Suggestion) -> dict[str, Any]:
    """Return a suggestion as the report holds it."""
    shown = [{"question": _preview(question), "answer": _preview(answer)} for question, answer in line.shown]
    return {
        "line": line.option,
        "columns": line.columns,
        "rows": line.read,
        "shown": shown,
        "left_out": list(line.left_out[:MAX_PATHS]),
    }


def _preview(text: str) -> str:
    """Return the beginning of a text on one line, without secrets and personal data."""
    clean: Any = redact_value(redact_value(" ".join(text[:LOOKED_AT_CHARS].split()), SECRETS), PERSONAL)
    return clean if len(clean) <= PREVIEW_CHARS else f"{clean[: PREVIEW_CHARS - 3]}..."


def _layouts(source: Source, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    counts: Counter[str] = Counter()
    paths: dict[str, dict[str, Counter[str]]] = {}
    for raw in _sample(source, FIRST_ROWS):
        try:
            read = read_example(raw, columns)
            texts = _paths_of_texts(parse_row(raw.payload), read.example)
        except (RowRefused, RecursionError):
            continue  # the checks report it, or it is too large to search
        counts[read.layout] += 1
        kinds = paths.setdefault(read.layout, {kind: Counter() for kind in PATH_KINDS})
        for kind, path in sorted(texts):
            if kind != "left_out" or path not in columns.values():  # a session, an agent
                kinds[kind][path] += 1
    for kinds in paths.values():  # text that is left out of one row only, such as a last turn, is read
        for path in [path for path in kinds["left_out"] if any(path in kinds[kind] for kind in KIND_OF_ROLE.values())]:
            del kinds["left_out"][path]
    return [
        {
            "layout": layout,
            "rows": count,
            "rows_at": source.inside,
            **{kind: [path for path, _ in kinds.most_common(MAX_PATHS)] for kind, kinds in paths[layout].items()},
        }
        for layout, count in counts.most_common()
    ]


def _paths_of_texts(row: Row, example: Example) -> set[tuple[str, str]]:
    """Return (kind, path) of each text of a row: the kind of its place in the conversation, or left_out."""
    called = {text for m in example.messages for call in m.tool_calls for text in texts_in(call["function"])}
    offered = set(texts_in([dict(tool) for tool in example.tools]))
    whole = {message.content.strip(): KIND_OF_ROLE[message.role] for message in reversed(example.messages)}
    paths: set[tuple[str, str]] = set()
    left_out: dict[str, str] = {}
    for path, value in _texts(row):
        if not value.strip():
            continue
        forms = (value.strip(), without_markup(value))
        kind = next((whole[text] for text in forms if text in whole), None)
        kind = kind or next((kind for text in forms if (kind := _kind_within(text, example.messages))), None)
        if kind is None and value in called:
            kind = "answer"
        # A column that is in no list of columns.toml is reported however short its values are.
        unlisted = len(path) == 1 and column_kind(plain_name(path[0])) == "unknown"
        if kind is None and not looks_like_content(value) and not unlisted:
            continue
        kind = kind or ("tools" if value in offered else "left_out")
        name = ".".join(path).replace(".[]", "[]")
        paths.add((kind, name))
        if kind == "left_out":
            left_out[name] = value
    read = {kind for kind, _ in paths}
    for message in example.messages:  # of which template marks were removed: the text around it is no text left out
        kind = KIND_OF_ROLE[message.role]
        if kind not in read and looks_like_content(message.content):
            around = [name for name, text in left_out.items() if message.content.strip() in text]
            paths.update((kind, name) for name in around)
            paths.difference_update(("left_out", name) for name in around)
    return paths


def _texts(row: Row) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path, text) of every text in a row, outer ones first, also inside of JSON text.

    Raise RowRefused for a row with too many values.
    """
    waiting: deque[tuple[tuple[str, ...], Any]] = deque([((), row)])
    for num_nodes in itertools.count(1):
        if not waiting:
            return
        path, value = waiting.popleft()
        if num_nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise RowRefused("unknown-layout", "the row holds too much to look through")
        value = parsed(value) if isinstance(value, str) and is_json_text(value) else value
        if isinstance(value, dict):
            waiting.extend(((*path, str(key)), inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend(((*path, "[]"), inner) for inner in value)
        elif isinstance(value, str):
            yield path, value


def _kind_within(text: str, messages: Sequence[Message]) -> str | None:
    """Return the kind of the message that contains a text, or None; reasoning counts too."""
    if not looks_like_content(text):
        return None
    written = json.dumps(text, ensure_ascii=False)[1:-1]  # as it is written in a tool's result that is an object
    for message in messages:
        if text in message.content or text in (message.reasoning or "") or written in message.content:
            return KIND_OF_ROLE[message.role]
    return None


def first_row(inputs: Inputs) -> Row:
    """Return the first row of the files that is an object, empty where their samples hold none."""
    samples = (_records(source, FIRST_ROWS) for source in _files(inputs))
    return next((row for row in itertools.chain.from_iterable(samples) if isinstance(row, dict)), {})


def _files(inputs: Inputs) -> list[Source]:
    return [source for source in inputs.sources if source.kind != STORE]


def _records(source: Source, limit: int) -> list[Any]:
    """Return the first records of a file, those of a quarantine file out of their wrappers; None for no JSON."""
    records = []
    for raw in _sample(source, limit):
        try:
            record = json.loads(raw.payload)
            records.append(parse_row(raw.payload) if isinstance(record, dict) and QUARANTINE_KEY in record else record)
        except (ValueError, RecursionError, RowRefused):
            records.append(None)
    return records


def _sample(source: Source, limit: int) -> Iterator[RawRow]:
    """Yield the first rows of a file, fewer if they are large."""
    size_bytes = 0
    for raw in itertools.islice(read_rows(source), limit):
        if raw.problem is None:
            yield raw
            size_bytes += len(raw.payload)
            if size_bytes > FIRST_BYTES:
                break
