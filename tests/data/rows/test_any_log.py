"""Whatever stands where a log has something else: a row is read or refused with a reason, never a crash."""

import copy
import json
import random
from pathlib import Path
from typing import Any

from test_logs import LOGS, REFUSED, TOOL_LOGS
from test_samples import samples

from hivetune.data.intake.files import plan_inputs
from hivetune.data.reasons import REASONS, RowRefused
from hivetune.data.rows.read import RawRow, read_example, read_rows

JUNK: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e300, "", " ", "text", "[", "{}", '[{"role": "user"}]', [], {}, [[]], [None], [1, "a"]),
    *("INFINITE", 10**400, "9" * 5000),
    *([{"a": 1}], {"a": []}, {"role": []}, {"content": {}}, {"type": []}, "\ud83d", ["text", ["text"]], {"": {"": {}}}),
)
NUM_CHANGES = 3000


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside `value`."""
    found = [path] if path else []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        found += places(item, (*path, key))
    return found


def changed(row: Any, rng: random.Random) -> Any:
    """`row` with one to three things in it replaced."""
    row = copy.deepcopy(row)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(places(row) or [()])
        if not path:
            return row
        node = row
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = copy.deepcopy(rng.choice(JUNK))
    return row


def test_changed_rows_never_crash() -> None:
    rng = random.Random(11)
    rows: list[Any] = [record for record, *_ in LOGS.values()] + [record for record, _ in REFUSED.values()]
    rows += TOOL_LOGS.values()
    rows += [
        json.loads(line) for sample in samples() for line in sample["text"].split("\n")[:1] if 0 < len(line) < 9000
    ]
    for _ in range(NUM_CHANGES):
        payload = json.dumps(changed(rng.choice(rows), rng)).replace('"INFINITE"', "1e999").encode()
        try:
            found = read_example(RawRow("f:1", payload), {})
        except RowRefused as error:
            assert error.reason in REASONS
        else:
            assert found.example.messages
            assert all(isinstance(message.content, str) for message in found.example.messages)


def test_changed_files_never_crash(tmp_path: Path) -> None:
    """Sessions, batches and containers, a line or two of them changed."""
    rng = random.Random(12)
    files = [s for s in samples() if any(name in s["name"] for name in ("claude", "codex", "langfuse", "langsmith"))]
    for number in range(150):
        lines = [json.loads(line) for line in rng.choice(files)["text"].split("\n") if line]
        for i in rng.sample(range(len(lines)), min(2, len(lines))):
            lines[i] = changed(lines[i], rng)
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for chunk in plan_inputs(str(path), folder).chunks:
            for raw in read_rows(chunk):
                try:
                    read_example(raw, {})
                except RowRefused as error:
                    assert error.reason in REASONS
