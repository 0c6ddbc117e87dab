"""A log of Inspect, as JSON or as an `.eval` file: a ZIP archive with a JSON document for each sample. What the model
under test said is learned as far as all scores call it right: rows say so in `success`.

https://inspect.aisi.org.uk/eval-logs.html
"""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.logs import MAX_ROW_CHARS, PlacedRow
from hivetune.data.pieces.said import Row, listed, names, objects, one_of
from hivetune.data.reasons import RowRefused

_ATTACHED = "attachment://"  # a long text that Inspect keeps once, below its hash
_CUT = {"max_tokens": "length", "model_length": "length", "content_filter": "content_filter"}
_RIGHT, _WRONG = ("C", 1, True), ("I", "N", 0, False)


def rows(record: Row) -> Iterator[Row]:
    return map(_row, objects(record["samples"]) or [] if isinstance(record.get("eval"), dict) else [])


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of Inspect: its conversation, and whether all scores call it right."""
    attached = sample.get("attachments")
    turns = _with_attached(sample.get("messages"), attached if isinstance(attached, dict) else {})
    scores = sample.get("scores") or {"score": sample.get("score")}
    scores = listed([one_of(score, "value") for score in scores.values()] if isinstance(scores, dict) else None)
    scores = [score for score in scores if isinstance(score, str | int | float)]
    wrong, right = any(score in _WRONG for score in scores), bool(scores) and all(score in _RIGHT for score in scores)
    success = False if wrong or sample.get("error") or sample.get("limit") else True if right else None
    events = objects(sample.get("events")) or []  # the tools of the first call are those of the sample
    tools = next((event["tools"] for event in events if event.get("event") == "model" and event.get("tools")), None)
    row = {"id": f"{sample.get('id')}-{sample.get('epoch', 1)}", "success": success, "tools": tools}
    choice = next(iter(listed(one_of(sample.get("output"), "choices"))), None)
    ended = _CUT.get(str(one_of(choice, "stop_reason")))
    if ended is not None and isinstance(turns, list) and turns:
        return {**row, "messages": turns[:-1], "choices": [{"message": turns[-1], "finish_reason": ended}]}
    return {**row, "messages": turns if isinstance(turns, list) else []}


def _with_attached(value: Any, attached: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith(_ATTACHED):
        return attached.get(value.removeprefix(_ATTACHED), value)
    if isinstance(value, list):
        return [_with_attached(item, attached) for item in value]
    if isinstance(value, dict):
        return {key: _with_attached(item, attached) for key, item in value.items()}
    return value


_BEGUN = ("header.json", "_journal/start.json")
_MAX_TIMES = 300  # that a sample may unpack to, beyond it the archive was made to fill memory
_ALWAYS_BYTES = 64 << 20
_UNREADABLE = (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError)


def is_eval_file(path: str) -> bool:
    """Return whether a ZIP archive is a log of Inspect's."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name in archive.namelist() for name in _BEGUN)
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def eval_rows(path: str) -> Iterator[PlacedRow]:
    """Yield one row for each sample, in the order of their names; its place is its number."""
    with zipfile.ZipFile(path) as archive:
        samples = sorted(name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json"))
        for number, name in enumerate(samples, 1):
            info = archive.getinfo(name)
            if info.file_size > max(_ALWAYS_BYTES, _MAX_TIMES * info.compress_size):
                hint = f"{name} unpacks to more than {_MAX_TIMES} times its size; unpack it yourself"
                yield number, RowRefused("broken-file", hint)
                continue
            try:
                sample = json.loads(archive.read(name))
            except (*_UNREADABLE, ValueError, RecursionError) as error:
                yield number, RowRefused("broken-file", " ".join(f"{name} can't be read: {error}".split()))
                continue
            text = json.dumps(_row(sample) if isinstance(sample, dict) else sample)
            too_large = RowRefused("line-too-large", f"the sample has {len(text):,} characters")
            yield number, text if len(text) <= MAX_ROW_CHARS // 2 else too_large


FORMAT = Batch("inspect", rows, needs=names("samples"))
