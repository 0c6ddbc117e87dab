"""`make corpus`: reads every file of the corpus of rows again and prints what is read differently from before.

The corpus holds files that people have, and for each what became of its rows: conversations with weights, reasons and
warnings. Exit code 1 when anything differs.

    python tools/corpus.py                  replay all cases
    python tools/corpus.py --write          make what is read now the expectation (after review)
"""

import base64
import gzip
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hivetune.data.checks.rules import CHECKS, check_messages
from hivetune.data.files.inputs import plan_inputs
from hivetune.data.prepare.understand import understand
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.snapshot import messages_json
from hivetune.errors import HivetuneError

CASES = Path(__file__).resolve().parent.parent / "tests" / "data" / "corpus" / "rows.jsonl.gz"
ABOUT = ("agent", "category", "session", "user", "time", "success", "feedback", "untrusted", "lesson", "answered_by")
Case = dict[str, Any]


def load_cases() -> list[Case]:
    """Each case: `id`, `files` ([name, text or {"b64": bytes}]), `columns` and `pairs` where they are not the defaults,
    and `outcome` as `read_case` returns it.
    """
    with gzip.open(CASES, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def save_cases(cases: list[Case]) -> None:
    """Write the corpus; equal cases give equal bytes."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    CASES.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


def read_case(case: Case) -> dict[str, Any]:
    """What becomes of the files of a case: `formats`: of each file; `rows`: place -> {"refused": reason} or {"by":
    layout, "messages": ..., "warnings": ...}; or `error`: the files were refused as a whole.
    """
    columns, rows = case.get("columns", {}), dict[str, Any]()
    with TemporaryDirectory() as name:
        within = str(Path(name, "files")) + os.sep
        paths = []
        for file, content in case["files"]:
            path = Path(within, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content["b64"]) if isinstance(content, dict) else content.encode())
            paths.append(str(path))
        Path(name, "spill").mkdir()
        try:
            inputs = understand(plan_inputs(paths, Path(name, "spill")), columns).inputs
            for raw in inputs.rows():
                place = raw.source.removeprefix(within)
                number = sum(1 for known in rows if known.partition("#")[0] == place)
                rows[f"{place}#{number}" if number else place] = _row(raw, columns, bool(case.get("pairs")))
            formats = {source.name.removeprefix(within): source.kind for source in inputs.sources}
        except HivetuneError as error:
            return {"error": type(error).__name__}
    plain: dict[str, Any] = json.loads(json.dumps({"formats": formats, "rows": rows}))
    return plain


def _row(raw: RawRow, columns: Mapping[str, str], pairs: bool) -> dict[str, Any]:
    try:
        read = read_example(raw, columns, pairs=pairs)
        check_messages(read.example.messages, CHECKS)
    except RowRefused as refused:
        return {"refused": refused.reason}
    except RecursionError:
        return {"refused": "bad-json"}
    example = read.example
    outcome: dict[str, Any] = {"by": read.layout, "messages": json.loads(messages_json(example.messages))}
    outcome |= {"inside": raw.file.inside} if raw.file is not None and raw.file.inside else {}
    outcome |= {"tools": [dict(tool) for tool in example.tools]} if example.tools else {}
    outcome |= {"worse": json.loads(messages_json([example.worse]))} if example.worse is not None else {}
    outcome |= {name: value for name in ABOUT if (value := getattr(example, name)) not in (None, False, "sft")}
    return outcome | ({"warnings": sorted(read.changed)} if read.changed else {})


def differences(case: Case, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield where what is read now differs from what the case expects; formats and layouts may have other names."""
    before = case["outcome"]
    if before.get("error") != now.get("error"):
        yield f"{case['id']}: {before.get('error', 'read')} -> {now.get('error', 'read')}"
        return
    old, new = before.get("rows", {}), now.get("rows", {})
    for place in dict.fromkeys((*old, *new)):
        if _content(old.get(place)) != _content(new.get(place)):
            yield f"{case['id']} {place}\n    {json.dumps(old.get(place))}\n -> {json.dumps(new.get(place))}"


def _content(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {name: value for name, value in row.items() if name not in ("by", "inside")}


def main() -> int:
    cases = load_cases()
    now = [read_case(case) for case in cases]
    if "--write" in sys.argv[1:]:
        save_cases([{**case, "outcome": outcome} for case, outcome in zip(cases, now, strict=True)])
        return 0
    found = [text for case, outcome in zip(cases, now, strict=True) for text in differences(case, outcome)]
    rows = sum(len(case["outcome"].get("rows", ())) for case in cases)
    print("\n".join([*found, f"{len(cases):,} cases with {rows:,} rows: {len(found):,} differences"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
