"""`make corpus`: reads every file of the corpus of rows again and prints what is read differently from before.

The corpus holds the files that the tests of rows read, and for each what became of its rows: conversations with
weights, reasons, warnings and counts. Exit code 1 when a difference isn't listed in tests/data/corpus/wanted.toml.

    python tools/corpus.py                  replay all cases
    python tools/corpus.py --show CASE      the files of a case, what was read and what is read now
    python tools/corpus.py --write          make what is read now the expectation (after review)
"""

import argparse
import base64
import functools
import gzip
import json
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hivetune.base.kernel import usable_cores
from hivetune.config import DataConfig, LearnConfig
from hivetune.data.checks.rules import CHECKS, check_messages
from hivetune.data.files.inputs import plan_inputs
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import understand
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.data.snapshot import messages_json
from hivetune.errors import HivetuneError

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "data" / "corpus"
CASES, WANTED = FOLDER / "rows.jsonl.gz", FOLDER / "wanted.toml"
MAX_PRINTED = 15  # differences of one kind
MAX_CHARS = 160  # of an outcome in one line
COUNTED = ("rows_in", "usable", "duplicates", "rejected", "set_aside", "changed")
ABOUT = ("agent", "category", "session", "user", "time", "success", "feedback", "untrusted", "lesson", "answered_by")

Case = dict[str, Any]


class Difference(NamedTuple):
    """`by`: the layout by which the row was read before, if it was; `now`: the reason of a refusal, if it is one."""

    kind: str
    case: str
    place: str
    by: str
    now: str
    text: str


def load_cases() -> list[Case]:
    """Each case: `id`, `files` ([name, text or {"b64": bytes}]), the settings `columns`, `pairs`, `data` and `learn`
    where they are not the defaults, and `outcome` as `read_case` returns it.
    """
    with gzip.open(CASES, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def save_cases(cases: Sequence[Case]) -> None:
    """Write the corpus; equal cases give equal bytes."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    CASES.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


def read_case(case: Case) -> dict[str, Any]:
    """What becomes of the files of a case.

    `formats`: of each file; `rows`: place -> {"refused": reason} or {"by": layout, "messages": ..., "warnings": ...};
    `counts`: those of `data check` where a case has its settings; `error`: the files were refused as a whole.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        paths = _written(case, folder)
        (folder / "spill").mkdir()
        try:
            outcome = _rows(case, paths, folder)
            if "data" in case:
                learn = LearnConfig(use=case["learn"]) if "learn" in case else LearnConfig()
                data = DataConfig(path=paths, columns=case.get("columns", {}), **case["data"])
                report = check(data, learn=learn).document
                outcome["counts"] = {name: report[name] for name in COUNTED}
        except HivetuneError as error:
            return {"error": type(error).__name__}
        plain: dict[str, Any] = json.loads(json.dumps(outcome))
        return plain


def _rows(case: Case, paths: list[str], folder: Path) -> dict[str, Any]:
    columns = case.get("columns", {})
    inputs = understand(plan_inputs(paths, folder / "spill"), columns).inputs
    within = str(folder / "files") + os.sep
    rows: dict[str, Any] = {}
    for raw in inputs.rows():
        place = raw.source.removeprefix(within)
        number = sum(1 for known in rows if known.partition("#")[0] == place)
        rows[f"{place}#{number}" if number else place] = _row(raw, columns, bool(case.get("pairs")))
    return {"formats": {source.name.removeprefix(within): source.kind for source in inputs.sources}, "rows": rows}


def _row(raw: RawRow, columns: Mapping[str, str], pairs: bool) -> dict[str, Any]:
    try:
        read = read_example(raw, columns, pairs=pairs)
        check_messages(read.example.messages, CHECKS)
    except RowRefused as refused:
        return {"refused": refused.reason}
    except RecursionError:
        return {"refused": "too-deep"}
    example = read.example
    outcome: dict[str, Any] = {"by": read.layout, "messages": json.loads(messages_json(example.messages))}
    if raw.file is not None and raw.file.inside:
        outcome["inside"] = raw.file.inside
    if example.tools:
        outcome["tools"] = [dict(tool) for tool in example.tools]
    if example.worse is not None:
        outcome["worse"] = json.loads(messages_json([example.worse]))
    outcome |= {name: value for name in ABOUT if (value := getattr(example, name)) not in (None, False, "sft")}
    if read.changed:
        outcome["warnings"] = sorted(read.changed)
    return outcome


def differences(case: Case, now: Mapping[str, Any]) -> Iterator[Difference]:
    """How what is read now differs from what the case expects; the names of formats and layouts may change."""
    before, name = case["outcome"], case["id"]
    if "error" in before or "error" in now:
        old, new = before.get("error"), now.get("error")
        if old != new:
            kind = "read now" if new is None else "refused now" if old is None else "other reason"
            by = ",".join(sorted({row.get("by", "") for row in before.get("rows", {}).values()}))
            yield Difference(kind, name, "", by, new or "", f"{old} -> {new}")
        return
    found = False
    for place in dict.fromkeys((*before["rows"], *now["rows"])):
        row, row_now = before["rows"].get(place), now["rows"].get(place)
        differs = _kind(row, row_now)
        if differs is not None:
            found = True
            by, reason = (row or {}).get("by", ""), (row_now or {}).get("refused", "" if row_now else "no row")
            yield Difference(differs, name, place, by, reason, f"{_short(row)}\n      -> {_short(row_now)}")
    if not found and before.get("counts") != now.get("counts"):
        yield Difference("other counts", name, "", "", "", f"{before.get('counts')}\n      -> {now.get('counts')}")


def _kind(old: Any, new: Any) -> str | None:
    was_read, is_read = old is not None and "by" in old, new is not None and "by" in new
    if was_read and is_read:
        if _content(old) != _content(new):
            return "read otherwise"
        return "other warnings" if old.get("warnings") != new.get("warnings") else None
    if was_read or is_read:
        return "refused now" if was_read else "read now"
    return "other reason" if (old or {}).get("refused") != (new or {}).get("refused") else None


def _content(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("by", "inside", "warnings")}


def _short(row: Mapping[str, Any] | None) -> str:
    text = json.dumps(row) if row is not None else "no row"
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."


def load_wanted() -> list[dict[str, Any]]:
    """The differences that are meant: `kind` and `why`, and the `case` (an id or a list) or the layout `by` that it is
    about, or the new reason `now`.
    """
    wanted: list[dict[str, Any]] = tomllib.loads(WANTED.read_text(encoding="utf-8")).get("wanted", [])
    for entry in wanted:
        if not {"kind", "why"} < entry.keys() <= {"kind", "why", "case", "by", "now"}:
            raise SystemExit(f"{WANTED}: an entry has kind and why, and case, by or now: {entry}")
    return wanted


def is_wanted(one: Difference, wanted: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        entry["kind"] == one.kind
        and all(
            getattr(one, name) in ([entry[name]] if isinstance(entry[name], str) else entry[name])
            for name in ("case", "by", "now")
            if name in entry
        )
        for entry in wanted
    )


def on_all_cores(read: Callable[[Case], Any], cases: Sequence[Case]) -> list[Any]:
    with ProcessPoolExecutor(min(4, usable_cores())) as pool:
        return list(pool.map(read, cases, chunksize=20))


def _written(case: Case, folder: Path) -> list[str]:
    paths = []
    for file, content in case["files"]:
        path = folder / "files" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content["b64"]) if isinstance(content, dict) else content.encode())
        paths.append(str(path))
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="CASE", help="id of one case")
    parser.add_argument("--write", action="store_true", help="make what is read now the expectation")
    options = parser.parse_args()
    cases = load_cases()
    if options.show:
        for case in [case for case in cases if case["id"].startswith(options.show)]:
            _show(case)
        return 0
    results = on_all_cores(read_case, cases)
    if options.write:
        save_cases([{**case, "outcome": now} for case, now in zip(cases, results, strict=True)])
        return 0
    found = [one for case, now in zip(cases, results, strict=True) for one in differences(case, now)]
    return _report(cases, found, load_wanted())


def _report(cases: Sequence[Case], found: Sequence[Difference], wanted: Sequence[Mapping[str, Any]]) -> int:
    rows = sum(len(case["outcome"].get("rows", ())) for case in cases)
    unwanted = [one for one in found if not is_wanted(one, wanted)]
    counts, missed = Counter(one.kind for one in found), Counter(one.kind for one in unwanted)
    print(f"{len(cases):,} cases with {rows:,} rows; same: {rows - len(found):,}")
    for kind, count in counts.most_common():
        print(f"{kind}: {count:,}, of them not wanted: {missed[kind]:,}")
    for kind in missed:
        some = [one for one in unwanted if one.kind == kind]
        print(f"\n{kind}, not wanted:")
        for one in some[:MAX_PRINTED]:
            print(f"  {one.case} {one.place} {f'({one.by})' if one.by else ''}\n      {one.text}")
        if len(some) > MAX_PRINTED:
            print(f"  and {len(some) - MAX_PRINTED:,} more")
    return 1 if unwanted else 0


def _show(case: Case) -> None:
    now = read_case(case)
    print(f"case {case['id']}, settings { ({k: v for k, v in case.items() if k not in ('id', 'files', 'outcome')}) }")
    for name, content in case["files"]:
        print(f"--- {name}\n{content}")
    dump = functools.partial(json.dumps, indent=1)
    print(f"--- before\n{dump(case['outcome'])}\n--- now\n{dump(now)}")


if __name__ == "__main__":
    sys.exit(main())
