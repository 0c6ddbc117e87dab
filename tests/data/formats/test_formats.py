"""The contract of a format: each has a sample, and `NAME.expected.jsonl` beside it says what is read of it.

A sample is `samples/NAME.EXT`, or `samples/NAME--WHAT.EXT` for more of one format. A line of the expected file is a
conversation, or {"refused": REASON}. `python tests/data/formats/test_formats.py` writes those that are not there yet:
read them before you commit them.
"""

import contextlib
import inspect
import json
import sqlite3
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from hivetune.data import formats
from hivetune.data.columns import plain_row
from hivetune.data.files.inputs import plan_inputs
from hivetune.data.formats import all_formats, formats_with, read_conversation, rows_inside
from hivetune.data.pieces.format import Format, Log, Store
from hivetune.data.pieces.values import Row
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

FOLDER = Path(__file__).parent / "samples"
SAMPLES = sorted(path for path in FOLDER.iterdir() if not path.name.endswith(".expected.jsonl"))
# Who answers in the samples in which people speak.
ANSWERS = {
    **dict.fromkeys(("discord", "discord--days", "discord--notes", "discord--only-a-file", "discord-thread"), "ben"),
    **dict.fromkeys(("github-issues", "github-rest"), "ben"),
    **dict.fromkeys(("slack", "slack--nobody-is-answered", "slack--only-a-file"), "Ben"),
    **dict.fromkeys(("telegram--days", "telegram-all"), "Ben"),
    **dict.fromkeys(("mail", "mail--threads"), "desk@example.org"),
}
EMPTY = (None, (), [], 1.0)


def format_of(sample: Path) -> str:
    return sample.name.partition(".")[0].partition("--")[0]


def expected_of(sample: Path) -> Path:
    return sample.with_name(f"{sample.name.partition('.')[0]}.expected.jsonl")


def read_sample(sample: Path) -> list[dict[str, Any]]:
    columns = {"assistant": ANSWERS[sample.stem]} if sample.stem in ANSWERS else {}
    return [row_of(raw, columns) for raw in rows_of_files(str(sample))]


def row_of(raw: Any, columns: dict[str, str]) -> dict[str, Any]:
    line = int(raw.source.rpartition(":")[2])
    try:
        read = read_example(raw, columns)
    except RowRefused as refused:
        return {"line": line, "refused": refused.reason}
    example = asdict(read.example)
    facts = {
        key: example[key] for key in ("tools", "session", "user", "time", "success", "feedback", "worse", "lesson")
    }
    messages = [{key: value for key, value in one.items() if value not in EMPTY} for one in example["messages"]]
    row = {"line": line, "layout": read.layout, "messages": messages, "changed": list(read.changed), **facts}
    kept = {key: value for key, value in row.items() if value not in EMPTY and value != "sft"}
    return dict(json.loads(json.dumps(kept)))


def mutated(value: Any) -> Iterator[Any]:
    """Yield `value` with each part of it in turn replaced by values of other types."""
    yield from ({}, [[]], 1, "x")
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for part in mutated(value[key]):
            changed = value.copy()
            changed[key] = part
            yield changed


def test_no_part_of_another_type_ends_a_check() -> None:
    for sample in SAMPLES:
        for raw in list(rows_of_files(str(sample)))[:3]:
            for row in mutated(json.loads(raw.payload) if raw.problem is None else {}):
                payload = json.dumps(row).encode()
                for inside in rows_inside(payload) or [payload]:
                    with contextlib.suppress(RowRefused):
                        read_example(raw._replace(payload=inside, file=None), {})


def forget_formats() -> None:
    for cached in (formats.all_formats, formats.formats_with, formats._of_kind, formats._batch_mark):
        cached.cache_clear()


@pytest.fixture
def own_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a user's formats."""
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path))
    (tmp_path / "formats").mkdir()
    forget_formats()
    yield tmp_path / "formats"
    forget_formats()


@pytest.fixture
def bring(own_formats: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a package that brings a format."""
    (own_formats / "desk_formats.py").write_text(
        "from hivetune.data.pieces.format import Format, Log\n"
        "GOOD = Format('our-desk', lambda row: row['posts'][0]['staff'], needs=('posts',))\n"
        "LOG = Log('our-log', lambda head: 1 / 0, lambda lines: [])\n"
        "DAYS = GOOD._replace(days=lambda record: 1 / 0, mark='posts')\n"
    )
    monkeypatch.syspath_prepend(own_formats)

    def installed(value: str) -> None:
        monkeypatch.setattr(formats, "entry_points", lambda group: [EntryPoint("our-desk", value, group)])

    return installed


@pytest.mark.parametrize("value", ["NONE", "Format", "LOG", "DAYS"])
def test_a_package_with_a_broken_format_is_named(bring: Callable[[str], None], value: str) -> None:
    """As are formats whose functions would end a check of other people's files."""
    bring(f"desk_formats:{value}")
    with pytest.raises(UsageError, match=rf"the format 'our-desk' of another package \(desk_formats:{value}\)"):
        all_formats()


def test_a_row_that_a_packages_format_fails_on_is_refused(bring: Callable[[str], None]) -> None:
    bring("desk_formats:GOOD")
    with pytest.raises(RowRefused) as refused:
        read_conversation({"posts": [{"text": "hello"}]})
    assert refused.value.hint == "the format our-desk of another package failed on it: KeyError: 'staff'"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_samples_are_read_as_expected(sample: Path) -> None:
    expected = [json.loads(line) for line in expected_of(sample).read_text(encoding="utf-8").splitlines()]
    assert read_sample(sample) == expected


def test_every_format_has_a_sample() -> None:
    own = {one.name for one in all_formats() if not isinstance(one, Store)}
    assert own <= {format_of(sample) for sample in SAMPLES}


def test_every_format_links_to_what_defines_it() -> None:
    """A page of its program, or ours where it has none."""
    entries = tomllib.loads(formats.OWN_FILE.read_text(encoding="utf-8"))
    docs = {name: entry.get("page", "") for name, entry in entries.items()}
    for one in all_formats():
        if one.name not in docs:
            docs[one.name] = inspect.getdoc(inspect.getmodule(one.read if isinstance(one, Format) else one.rows)) or ""
    assert not [name for name, doc in docs.items() if "http" not in doc and "docs/formats.md" not in doc]


def test_the_store_of_opencode(tmp_path: Path) -> None:
    """Messages that the user took back are gone; a subagent's session is a conversation of its own."""
    path = tmp_path / "opencode.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(
            "CREATE TABLE session (id TEXT, revert TEXT); CREATE TABLE part (id TEXT, message_id TEXT, data TEXT);"
            "CREATE TABLE message (id TEXT, session_id TEXT, time_created INTEGER, data TEXT);"
            """INSERT INTO session VALUES ('s1', '{"messageID": "m3"}'), ('s2', NULL), ('s3', NULL);"""
        )
        turns = [("m1", "s1", "user", "Which file?"), ("m2", "s1", "assistant", "It is a.txt.")]
        turns += [("m3", "s1", "user", "And then?"), ("m4", "s1", "assistant", "b.txt")]
        turns += [("m5", "s2", "user", "How many?"), ("m6", "s2", "assistant", "Two.")]
        for time, (message, session, role, text) in enumerate(turns):
            data, part = json.dumps({"role": role}), json.dumps({"type": "text", "text": text})
            database.execute("INSERT INTO message VALUES (?, ?, ?, ?)", (message, session, time, data))
            database.execute("INSERT INTO part VALUES (?, ?, ?)", (f"p{message}", message, part))
        database.commit()
    read = [read_example(raw, {}) for raw in rows_of_files(str(path))]
    assert [(one.example.session, [m.content for m in one.example.messages]) for one in read] == [
        ("s1", ["Which file?", "It is a.txt."]),
        ("s2", ["How many?", "Two."]),
    ]


PAGE = Path(__file__).parents[3] / "docs" / "formats.md"
DESK = PAGE.read_text(encoding="utf-8").split("```toml\n")[1].partition("```")[0]
TICKET = {
    "desk_ticket": 7,
    "posts": [
        {"staff": False, "text": "It hangs."},
        {"staff": True, "text": "Ask Ben.", "internal": True},
        {"staff": True, "text": "Restart it."},
    ],
}


def test_the_example_of_the_page_is_a_users_format(own_formats: Path) -> None:
    (own_formats / "desk.toml").write_text(DESK, encoding="utf-8")
    read = read_conversation(TICKET)
    assert read.layout == "our-desk"
    assert [(m.role, m.content) for m in read.messages] == [("user", "It hangs."), ("assistant", "Restart it.")]
    assert read.changed == ("program-notes",)


EVENTS = """
[agent-log]
needs = ["run", "event"]
thread = "run"
position = "seq"
role = "event"
roles = { asked = "user", said = "assistant", got = "tool" }
text = "[text && {type: 'text', text: text}, tool && {type: 'tool_call', name: tool, arguments: args}][?@] || output"
skip = "event == 'heartbeat'"
"""


def test_a_log_of_one_event_a_line_is_a_users_format(own_formats: Path, tmp_path: Path) -> None:
    """With `skip` for the events that are no turn, which stood between the turns as rows."""
    (own_formats / "agent.toml").write_text(EVENTS, encoding="utf-8")
    events = [
        {"run": "a", "seq": 1, "event": "asked", "text": "Where?"},
        {"run": "b", "seq": 1, "event": "heartbeat"},
        {"run": "a", "seq": 4, "event": "said", "text": "Here."},
        {"run": "a", "seq": 2, "event": "said", "text": "", "tool": "find", "args": {"q": "x"}},
        {"run": "a", "seq": 3, "event": "got", "output": "here"},
        {"run": "a", "seq": 5, "event": "heartbeat"},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    [read] = [read_example(raw, {}) for raw in rows_of_files(str(path))]
    assert [(m.role, m.content) for m in read.example.messages] == [
        ("user", "Where?"),
        ("assistant", ""),
        ("tool", "here"),
        ("assistant", "Here."),
    ]
    assert (read.layout, read.example.session, read.changed) == ("agent-log", "a", ("program-notes",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("messages =", "mesages ="), "unknown setting 'mesages', did you mean 'messages'"),
        (('needs = ["desk_ticket", "posts"]', ""), "'needs' is missing"),
        (('"posts"\nrole', '"posts["\nrole'), "'posts\\[' is not a path"),
        (("[our-desk]", "[messages]"), "two formats are called 'messages'"),
        (('skip = "internal"', 'refuse = { bad = "x" }'), "there is no reason 'bad'"),
        (("[our-desk]", "our-desk = 1\n[x]"), "'our-desk' is outside of a table"),
        (('skip = "internal"', 'day = "@"'), "sets day, but not mark and a column of turns"),
    ],
)
def test_a_wrong_file_of_formats_is_named(change: tuple[str, str], words: str, own_formats: Path) -> None:
    (own_formats / "desk.toml").write_text(DESK.replace(*change), encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        all_formats()


LOGS = [one.name for one in all_formats() if isinstance(one, Log)]
ROWS = [{"question": f"what is the size of boot {n}?", "answer": f"it is the size {n}"} for n in range(30)]
ROWS += [{"type": "open_qa", "prompt": f"what is {n}?", "completion": f"it is {n}"} for n in range(3)]
ROWS += [{"note": "of nobody"}]  # refused, and counted
ROWS += [{"type": "chat", "messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}]


@pytest.mark.parametrize(
    "sample", [one for one in SAMPLES if format_of(one) in LOGS and one.suffix == ".jsonl"], ids=lambda one: one.name
)
def test_rows_behind_a_log_in_one_file_are_rows(sample: Path, tmp_path: Path) -> None:
    """As of files that were joined. A log's reader left out what it does not know, and nobody counted it."""
    lines = sample.read_text(encoding="utf-8").rstrip("\n").split("\n")
    path = tmp_path / sample.name
    path.write_text("\n".join([*lines * (20 // len(lines) + 1), *map(json.dumps, ROWS)]), encoding="utf-8")
    assert set(map(json.dumps, ROWS)) <= {raw.payload.decode() for raw in plan_inputs(str(path), tmp_path).rows()}


def claims_record(one: Format, row: Row) -> bool:
    try:
        return one.read(row) is not None
    except RowRefused:
        return True


def test_no_two_programs_claim_one_record() -> None:
    """So that the order of their names decides nothing."""
    programs = {"langfuse", "langsmith", "gemini-cli-session", "zendesk", "intercom", "github-issues"}
    programs |= {"telegram", "discord"}
    shared = set(tomllib.loads(formats.OWN_FILE.read_text(encoding="utf-8"))) - programs
    for sample in (path for path in SAMPLES if path.suffix == ".jsonl"):
        for line in sample.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # samples of damaged files
                continue
            row = plain_row(record) if isinstance(record, dict) else {}
            asked = [one for one in formats_with(tuple(row)) if one.name not in shared]
            claims = [one.name for one in asked if claims_record(one, row)]
            assert len(claims) <= 1, f"{sample.name}: {claims}"


if __name__ == "__main__":
    for one in SAMPLES:
        if not expected_of(one).exists() or "--all" in sys.argv:
            lines = [json.dumps(row, ensure_ascii=False) for row in read_sample(one)]
            expected_of(one).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            print(f"{expected_of(one).name}: {len(lines)} rows")
