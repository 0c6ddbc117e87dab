"""From a config to a snapshot: found again, resumed after a kill, refused with numbers, read back whole."""

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data.conftest import adds_up, chat
from data.intake.collecting import collect_now
from data.models import make_family
from faults import planted

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, home, lock, manifest_problems, read_json
from hivetune.config import DataConfig, RunConfig, parse_config
from hivetune.data.columns import extract
from hivetune.data.files.inputs import plan_inputs
from hivetune.data.intake.interactions import tombstone
from hivetune.data.prepare import prepare as module
from hivetune.data.prepare.prepare import check, prepare, prepare_data
from hivetune.data.prepare.write import beside
from hivetune.data.reasons import LEAVE_OUT
from hivetune.data.render.folder import load_renderer
from hivetune.data.snapshot import REPORT, open_snapshot
from hivetune.errors import Busy, DataRefused, DoesNotFit, UsageError
from hivetune.records import Example


def config(path: Path | str, max_length: int = 512, **data: Any) -> RunConfig:
    return parse_config({"model": "m", "max_length": max_length, "data": {"path": str(path), **data}})


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [chat(f"What is number {i}?", f"It comes after {i - 1}.", agent=f"a{i % 3}", **more) for i in range(count)]


def test_a_snapshot_holds_what_was_rendered(write_rows: Callable[..., Path], chatml: Path) -> None:
    checker = {"name": "contains", "text": "x"}
    path = write_rows(rows(50, checker=checker, session_id="s", timestamp=5))
    snapshot = prepare(config(path, system_prompts={"a1": "Be a1."}), chatml)
    assert snapshot.num_rows == 50
    assert manifest_problems(snapshot.folder) == []
    renderer = load_renderer(chatml)
    for row in range(50):
        info = snapshot.info(row)
        assert info.source == f"{path}:{row + 1}"
        assert (info.checker, info.session, info.time) == (checker, "s", 5.0)
        assert (info.messages[0].content == "Be a1.") == (info.agent == "a1")
        tokens, mask = snapshot.tokens(row), snapshot.trained(row)
        assert (tokens.format, mask.format) == ("I", "B")
        text = renderer.text(info.messages)
        assert renderer.decode(list(tokens)) == text
        assert len(tokens) == len(mask) == snapshot.length(row)
        assert snapshot.num_trained(row) == sum(mask) > 0
    assert sorted(snapshot.rows("train") + snapshot.rows("validation") + snapshot.rows("test")) == list(range(50))
    with pytest.raises(IndexError):
        snapshot.info(50)
    report = read_json(snapshot.folder / REPORT)
    assert sum(report["splits"].values()) == 50
    assert set(report["agents"]) == {"a0", "a1", "a2"}
    known = open_database().execute("SELECT hash, path FROM snapshots").fetchall()
    assert known == [(snapshot.hash, f"snapshots/{snapshot.folder.name}")]


def test_the_same_input_is_prepared_once(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows(rows(20))
    first = prepare(config(path), chatml)
    written = (first.folder / "rows.sqlite").stat().st_mtime_ns
    again = prepare(config(path), chatml)
    assert again.folder == first.folder
    assert (again.folder / "rows.sqlite").stat().st_mtime_ns == written
    other = prepare(config(path, max_length=256), chatml)
    assert other.folder != first.folder
    assert other.hash == first.hash  # the same tokens
    assert [p.name for p in (home() / "snapshots").iterdir() if p.name.startswith(".")] == []
    path.write_text(path.read_text() + json.dumps(chat("one", "more")) + "\n")
    assert prepare(config(path), chatml).hash != first.hash


def test_where_the_rows_lie_does_not_change_the_hash(write_rows: Callable[..., Path], chatml: Path) -> None:
    one, other = write_rows(rows(20), "one.jsonl"), write_rows(rows(20), "two.jsonl")
    assert prepare(config(one), chatml).hash == prepare(config(other), chatml).hash


def test_a_folder_without_its_manifest_is_made_anew(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows(rows(20))
    first = prepare(config(path), chatml)
    (first.folder / MANIFEST).unlink()
    with pytest.raises(UsageError, match="is not a snapshot"):
        open_snapshot(first.folder)
    assert prepare(config(path), chatml).hash == first.hash


def test_bad_data_is_refused_with_its_reason(write_rows: Callable[..., Path], chatml: Path) -> None:
    bad = write_rows([*rows(5), *[chat("q", "")] * 5])
    with pytest.raises(DataRefused, match="5 of 10 rows are rejected") as refused:
        prepare(config(bad), chatml)
    assert refused.value.hint.startswith(f"{bad}:6")
    assert refused.value.hint.endswith("to go on without them: --set data.max_rejected=0.5")
    assert prepare(config(bad, max_rejected=0.5), chatml).num_rows == 5
    with pytest.raises(DataRefused, match="no rows"):
        prepare(config(write_rows([], "empty.jsonl")), chatml)
    with pytest.raises(DataRefused, match="none of the 3"):
        prepare(config(write_rows(["x"] * 3, "text.jsonl")), chatml)
    with pytest.raises(UsageError, match="does not exist"):
        prepare(config("nowhere.jsonl"), chatml)


def test_no_room_is_said_before_anything_is_written(
    write_rows: Callable[..., Path], chatml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DISK_PER_INPUT_BYTE", 1 << 60)
    with pytest.raises(DoesNotFit, match="GB"):
        prepare(config(write_rows(rows(3))), chatml)


@pytest.mark.slow
def test_children_give_what_one_process_gives(tmp_path: Path, chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, _ = planted(400, 60)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    settings = config(path, max_rejected=1)
    alone, snapshot = check(DataConfig(path=str(path)), model_folder=chatml), prepare(settings, chatml)
    shutil.rmtree(snapshot.folder)
    monkeypatch.setattr(module, "CHILDREN_FROM_BYTES", 0)
    monkeypatch.setattr(module, "num_workers", lambda: 3)
    again = prepare(settings, chatml)
    assert (again.hash, again.manifest["key"]) == (snapshot.hash, snapshot.manifest["key"])
    progress: list[tuple[int, int | None]] = []
    together = check(DataConfig(path=str(path)), model_folder=chatml, progress=lambda *p: progress.append(p))
    assert together.document == alone.document
    assert progress[-2:] == [(400, 400), (400, None)], "all are read, and nobody knows how long comparing them takes"
    counted = progress[progress.index((0, 400)) : -1]  # before it, files are hashed
    assert counted == sorted(counted)


def test_a_dead_worker_is_an_error_that_names_its_place(
    write_rows: Callable[..., Path], chatml: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "CHILDREN_FROM_BYTES", 0)
    monkeypatch.setattr(module, "num_workers", lambda: 2)
    broken = tmp_path / "model"
    broken.mkdir()
    with pytest.raises(Exception, match=r"(?s)died.*is incomplete"):
        check(DataConfig(path=str(write_rows(rows(400)))), model_folder=broken)


KILLED = """
import sys
from pathlib import Path
from hivetune.config import parse_config
from hivetune.data.prepare import prepare
config = parse_config({"model": "m", "max_length": 512, "data": {"path": sys.argv[1]}})
prepare.prepare(config, Path(sys.argv[2]), lambda done, total: (total or 0) > 500 and print(done, flush=True))
"""


@pytest.mark.slow
def test_a_killed_preparation_starts_again(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows(rows(2000))
    command = [sys.executable, "-c", KILLED, str(path), str(chatml)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for line in process.stdout:
        if int(line) > 500:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(command, capture_output=True, check=True)
    [folder] = (home() / "snapshots").iterdir()
    assert manifest_problems(folder) == []
    assert open_snapshot(folder).hash == prepare(config(write_rows(rows(2000), "other.jsonl")), chatml).hash


def test_rows_from_the_store(chatml: Path) -> None:
    database = open_database()
    for i, row in enumerate(rows(30)):
        database.execute(
            "INSERT INTO interactions (id, content_id, source, session, agent, row) VALUES (?, ?, ?, ?, ?, ?)",
            (f"i{i}", f"c{i}", f"log.jsonl:{i + 1}", "s", "stored", json.dumps(row)),
        )
    database.close()
    snapshot = prepare(config("store"), chatml)
    info = snapshot.info(7)
    assert (info.interaction_id, info.source, info.agent, info.session) == ("i7", "log.jsonl:8", "stored", "s")
    assert snapshot.num_rows == 30


def test_a_large_store_is_examined_by_children_too(tmp_path: Path) -> None:
    """The bytes of its rows were not counted, so one process examined them, whatever their number."""
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(30)))
    collect_now(str(tmp_path / "log.jsonl"))
    sizes = [plan_inputs(name, tmp_path).size_bytes for name in ("store", str(tmp_path / "log.jsonl"))]
    assert sizes[0] == sizes[1] - 30  # the line breaks


def test_each_stream_of_the_store_is_understood_by_itself() -> None:
    """A stream whose name begins with another one's and a colon was taken for a part of that one."""
    with contextlib.closing(open_database()) as database:
        for i in range(20):
            for name, more in (("chat", {}), ("chat:eu", {"note": "a" * (i + 1)})):
                row = json.dumps({"prompt": f"{name} {i}?", "completion": f"It is {i}.", **more})
                values = (f"{name} {i}", f"{name} {i}", f"{name}:17-{i}", row)
                database.execute("INSERT INTO interactions (id, content_id, source, row) VALUES (?, ?, ?, ?)", values)
    understood = check(DataConfig(path="store", near_duplicates=0)).document["understood"]
    unread = {name: [one["column"] for form in forms for one in form["not_read"]] for name, forms in understood.items()}
    assert unread == {"chat": [], "chat:eu": ["note"]}


@pytest.mark.parametrize(("policy", "usable"), [("reject", 0), ("split", 1), ("cut", 1)])
def test_rows_that_are_too_long(policy: str, usable: int, write_rows: Callable[..., Path], chatml: Path) -> None:
    turns = chat("first?", "short answer")["messages"] + chat("second?", " ".join(map(str, range(300))))["messages"]
    path = write_rows([{"messages": turns}, *rows(3)])
    report = check(DataConfig(path=str(path), on_overlong=policy), model_folder=chatml, max_length=64)
    assert report.usable == 3 + usable
    assert adds_up(report)
    assert report.document["rejected"] == ({} if usable else {"too-long": 1})
    assert report.document["changed"] == ({"shortened": 1} if usable else {})
    assert report.document["lengths"]["max"] > 64 or usable
    if policy == "split":
        snapshot = prepare(config(path, max_length=64, on_overlong=policy), chatml)
        assert [m.content for m in snapshot.info(0).messages] == ["first?", "short answer"]
    if policy == "cut":
        assert prepare(config(path, max_length=64, on_overlong=policy), chatml).length(0) == 64


def test_a_long_conversation_is_divided_and_each_answer_is_trained_once(
    write_rows: Callable[..., Path], chatml: Path
) -> None:
    turns = [{"role": "system", "content": "Be brief."}]
    for n in range(40):
        turns += chat(f"question {n}?", f"answer {n} " * (200 if n == 17 else 2))["messages"]
    path = write_rows([{"messages": turns, "checker": {"kind": "contains", "expected": "39"}}])
    chosen = config(path, max_length=128, on_overlong="split", validation=0.0, test=0.0)
    snapshot = prepare(chosen, chatml)
    assert snapshot.manifest["accounting"]["trained"] == 1
    [change] = check(chosen.data, model_folder=chatml, max_length=128).document["changes"]
    assert (change["reason"], change["hint"][:31]) == ("shortened", "1 of 40 answers are left out, e")
    parts = [snapshot.info(row) for row in range(snapshot.num_rows)]
    assert all(snapshot.length(row) <= 128 for row in range(snapshot.num_rows))
    assert all(part.messages[0].content == "Be brief." for part in parts)
    learned = [m.content.split()[1] for part in parts for m in part.messages if m.role == "assistant" and m.weight]
    assert learned == [str(n) for n in range(40) if n != 17]
    assert [part.checker is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    renderer = load_renderer(chatml)
    for row, part in enumerate(parts):
        (view,) = renderer.render(Example(part.id, part.source, part.messages))
        assert tuple(snapshot.tokens(row)) == view.tokens
        assert bytes(snapshot.trained(row)) == view.trained


def test_a_row_whose_one_trained_answer_is_cut_off_is_too_long(write_rows: Callable[..., Path], chatml: Path) -> None:
    turns = chat("first?", "short answer")["messages"] + chat("second?", " ".join(map(str, range(300))))["messages"]
    turns[1]["weight"] = 0
    report = check(
        DataConfig(path=str(write_rows([{"messages": turns}])), on_overlong="split"),
        model_folder=chatml,
        max_length=64,
    )
    assert report.document["rejected"] == {"too-long": 1}


@pytest.mark.parametrize(("kind", "value", "left"), [("user", "u3", 9), ("session", "s", 5), ("source", "{path}", 0)])
def test_what_was_forgotten_stays_out_of_files_too(
    kind: str, value: str, left: int, write_rows: Callable[..., Path], chatml: Path
) -> None:
    many = [row | {"user": f"u{i}"} | ({"session": "s"} if i % 2 else {}) for i, row in enumerate(rows(10))]
    path = write_rows(many)
    before = prepare(config(path), chatml)
    database = open_database()
    database.execute("INSERT INTO forgotten VALUES (?, ?, 0)", tombstone(kind, value.format(path=path)))
    database.close()
    report = check(DataConfig(path=str(path)))
    assert report.document["set_aside"] == {"forgotten": 10 - left}
    if left:
        assert prepare(config(path), chatml).folder != before.folder


def test_policies_set_aside_and_can_be_lifted(write_rows: Callable[..., Path]) -> None:
    odd = [
        chat("a?", "b", success=False),
        chat("c?", "d", feedback=-1),
        {"user_query": "e?", "tool": "web", "result": "f"},
        chat("g?", "h", answered_by="helpdesk@1"),
    ]
    approved = [
        chat("i?", "j", answered_by="helpdesk@1", feedback=1),
        chat("k?", "l", answered_by="helpdesk@1", success=True),
    ]
    path = write_rows([*rows(3), *odd, *approved])
    report = check(DataConfig(path=str(path)))
    assert report.document["set_aside"] == {"failed": 2, "own-answer": 1, "untrusted": 1}
    assert adds_up(report)
    lifted = check(DataConfig(path=str(path), also_train=["failed", "untrusted", "own_answers"]))
    assert (lifted.usable, lifted.document["set_aside"]) == (9, {})


@pytest.mark.parametrize(("policy", "rejected", "changed"), [("redact", 0, 1), ("reject", 1, 0), ("keep", 0, 0)])
def test_personal_data(policy: str, rejected: int, changed: int, write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows([*rows(8), chat("Mail?", "Write to jane.doe@mail.org today.")])
    report = check(DataConfig(path=str(path), on_private=policy), model_folder=chatml)
    assert report.document["rejected"] == ({"private": 1} if rejected else {})
    assert report.document["changed"] == ({"redacted-personal": 1} if changed else {})
    if not rejected:
        snapshot = prepare(config(path, on_private=policy), chatml)
        assert ("jane" in snapshot.info(8).messages[-1].content) == (policy == "keep")


def test_clean_rows_are_redacted_whole(tmp_path: Path) -> None:
    """Also where nothing is found in the texts to learn. Users and sessions stay as many as they were."""
    path, out = tmp_path / "rows.jsonl", tmp_path / "clean.jsonl"
    rows = [
        {
            **chat(f"q {n} {'jim@mail.org' * (n == 3)}", f"a {n}"),
            "user": f"u{n % 2}@mail.org",
            "contact": f"c{n}@mail.org",
        }
        for n in range(6)
    ]
    rows += [{**chat(f"q {n}", f"a {n}"), "User ID": f"v{n % 2}@mail.org", "n": n} for n in range(6, 10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(DataConfig(path=str(path)), clean=out)
    clean = [json.loads(line) for line in out.read_text().splitlines()]
    assert "@mail.org" not in out.read_text() and len(clean) == len(rows)
    assert len({extract(row).user for row in clean}) == len({extract(row).user for row in rows}) == 4
    check(DataConfig(path=str(path), on_private="keep"), clean=out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows


def test_clean_rows_are_utf_8(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "clean.jsonl"
    rows = [chat("Schöne Grüße?", f"Größe {n}: jane.doe@mail.org") for n in range(2)]
    texts = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_bytes("".join(texts).encode("cp1252"))
    assert check(DataConfig(path=str(path), encoding="cp1252"), clean=out).usable == 2
    assert [json.loads(line) for line in out.read_text("utf-8").splitlines()] == [
        chat("Schöne Grüße?", f"Größe {n}: [EMAIL]") for n in range(2)
    ]


def test_clean_and_quarantine_go_round(tmp_path: Path, chatml: Path) -> None:
    """What passed passes again; what was rejected is rejected again for the same reasons, until it is mended."""
    lines, reasons = planted(200, 45)
    lines.append(json.dumps(chat("Mail?", "To jane.doe@mail.org.")).encode())
    path, out = tmp_path / "rows.jsonl", tmp_path / "clean.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    first = check(DataConfig(path=str(path)), model_folder=chatml, clean=out)
    clean = check(DataConfig(path=str(out)), model_folder=chatml)
    assert (clean.rows_in, clean.usable) == (first.usable, first.usable)
    assert clean.document["changed"] == {}
    assert b"jane" not in out.read_bytes()
    quarantine = beside(out, "quarantine")
    entries = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert [(e["source"], e["reason"]) for e in entries] == [(f"{path}:{n}", r) for n, r in reasons.items()]
    again = check(DataConfig(path=str(quarantine)), model_folder=chatml, clean=tmp_path / "second.jsonl")
    assert again.rows_in == 45
    assert again.usable == 0
    bytes_lost = {"bad-characters", "bad-json"}  # what no JSON text can carry
    assert sum(again.document["rejected"].values()) == 45
    differing = {k: v for k, v in first.document["rejected"].items() if again.document["rejected"].get(k) != v}
    assert set(differing) <= bytes_lost
    mended = [{**e, "row": chat(f"mended {i}", f"now fine {i}")} for i, e in enumerate(entries)]
    quarantine.write_text("\n".join(json.dumps(e) for e in mended))
    mended_report = check(DataConfig(path=str(quarantine)), model_folder=chatml)
    assert (mended_report.usable, mended_report.document["unclear"]) == (45, {}), "its wrappers are no layout"


def test_rows_sqlite_is_as_documented(write_rows: Callable[..., Path], chatml: Path) -> None:
    snapshot = prepare(config(write_rows(rows(5))), chatml)
    database = sqlite3.connect(snapshot.folder / "rows.sqlite")
    columns = [name for _, name, *_ in database.execute("PRAGMA table_info(rows)")]
    documented = (
        "row id interaction_id source split agent category session user time length trained messages tools checker"
        " group_id answered_by view approved lesson better"
    )
    assert columns == documented.split()


def thinking_rows() -> list[dict[str, Any]]:
    turns = [
        ("user", "1+1?"),
        ("assistant", "2"),
        ("user", "2+2?"),
        ("assistant", "4"),
        ("user", "3+3?"),
        ("assistant", "6"),
    ]
    first = {"messages": [{"role": role, "content": text} for role, text in turns]}
    return [first, chat("What is a list?", "A mutable sequence."), chat("And a tuple?", "An immutable one.")]


def test_a_row_that_is_trained_turn_by_turn_is_one_row_in_every_count(
    write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_family(tmp_path / "qwen3", "qwen3")
    snapshot = prepare(config(write_rows(thinking_rows()), validation=0.0, test=0.0), model)
    assert snapshot.manifest["accounting"]["rows_in"] == snapshot.manifest["accounting"]["trained"] == 3
    assert snapshot.num_rows == 5
    assert snapshot.first_views() == {1: 0, 2: 0}
    renderer = load_renderer(model)
    for row in range(snapshot.num_rows):
        info = snapshot.info(row)
        (view,) = renderer.render(Example(info.id, info.source, info.messages))
        assert tuple(snapshot.tokens(row)) == view.tokens
        assert bytes(snapshot.trained(row)) == view.trained
    assert len({snapshot.info(row).id for row in range(3)}) == 1
    assert sum(snapshot.length(row) for row in range(5)) == snapshot.manifest["num_tokens"]
    assert sum(snapshot.num_trained(row) for row in range(5)) == snapshot.manifest["num_trained"]


def test_a_view_too_long_is_cut_or_refuses_its_row(write_rows: Callable[..., Path], tmp_path: Path) -> None:
    model = make_family(tmp_path / "qwen3", "qwen3")
    path = write_rows(thinking_rows())
    lengths = [prepare(config(path, validation=0.0, test=0.0), model).length(row) for row in range(3)]
    refused = check(config(path).data, model_folder=model, max_length=lengths[1])
    assert refused.document["rejected"] == {"too-long": 1}
    shorter = check(config(path, on_overlong="split").data, model_folder=model, max_length=lengths[1])
    assert shorter.document["changed"] == {"shortened": 1, "empty-thought": 3, "rewritten": 1}


def test_a_field_that_is_none_is_not_mapped_in_silence(write_rows: Callable[..., Path]) -> None:
    path = str(write_rows(rows(3)))
    with pytest.raises(UsageError, match="no field 'foo'") as caught:
        check(DataConfig(path=path, columns={"foo": "x"}))
    assert "the fields are: prompt, completion," in caught.value.hint
    with pytest.raises(UsageError) as caught:
        check(DataConfig(path=path, columns={"promt": "x"}))
    assert caught.value.hint == "did you mean 'prompt'?"


@pytest.mark.slow
def test_answers_that_melt_with_the_prompt_are_trained(write_rows: Callable[..., Path], smollm2: Path) -> None:
    """HumanEval's solutions begin with blanks, which SmolLM2's tokenizer joins with the line break in front of them."""
    rows = [{"prompt": f"def f{i}(x):\n", "completion": f"    return x + {i}"} for i in range(9)]
    assert check(DataConfig(path=str(write_rows(rows))), model_folder=smollm2).usable == 9


@pytest.mark.slow
def test_large_rows_are_written_one_after_the_other(
    tmp_path: Path, chatml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits to be written is bounded, whatever the number of rows: 900 rows of 1 MB took 1.9 GiB."""
    rng = random.Random(3)
    text = [str(rng.randrange(1000)) for _ in range(30_000)]

    def peak_bytes(num_rows: int) -> int:
        path = tmp_path / f"{num_rows}.jsonl"
        lines = (json.dumps(chat(f"question {i}", " ".join(text[i:] + text[:i]))) for i in range(num_rows))
        path.write_text("\n".join(lines))
        tracemalloc.start()
        try:
            data = {"path": str(path), "near_duplicates": 0}
            prepare(parse_config({"model": "m", "max_length": 1 << 24, "data": data}), chatml)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    monkeypatch.setattr(module, "num_workers", lambda: 2)  # 9 batches of 3 rows wait for them: 40 rows fill these
    peak_bytes(4)  # imports
    few, many = peak_bytes(40), peak_bytes(120)
    assert many < 1.5 * few < 75e6  # of three times the rows: 10.6 and 11.1 MB


@pytest.mark.slow
@pytest.mark.parametrize("rows_before", [40, 20_000])  # here, and in children
@pytest.mark.parametrize("change", ["cut off", "other rows", "gone", "grown"])
def test_a_file_that_is_rewritten_while_it_is_read_is_refused(change: str, rows_before: int, tmp_path: Path) -> None:
    """Its rows went missing without a word, or a snapshot held other rows than those it is found by."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(chat(f"What is {n}?", f"It is number {n}.")) + "\n" for n in range(rows_before)]
    path.write_text("".join(lines))
    after = {
        "cut off": lines[:9],
        "other rows": ["".join(lines).replace("number", "figure")],
        "grown": [*lines, lines[0]],
    }
    changed: list[bool] = []

    def rewrite(_done: int, total: int | None) -> None:
        """Somebody else, when the rows are counted and not yet read."""
        if total and not changed:
            changed.append(True)
            if change == "gone":
                path.unlink()
            else:
                path.write_text("".join(after[change]))

    data = DataConfig(path=str(path), near_duplicates=0)
    if change == "grown":
        assert check(data, progress=rewrite).rows_in == rows_before
    else:
        with pytest.raises(DataRefused, match=r"rows\.jsonl was changed while it was read"):
            check(data, progress=rewrite)
    assert changed


def test_rows_that_are_named_are_set_aside_and_all_others_stay(write_rows: Callable[..., Path], chatml: Path) -> None:
    path = write_rows(rows(60))
    whole = {row.id: row for row in prepare(config(path), chatml).pool()}
    named = {identity: [*LEAVE_OUT][n % len(LEAVE_OUT)] for n, identity in enumerate(sorted(whole)[:20])}
    snapshot = prepare(config(path), chatml, leave_out=named | {"of another day": "not-drawn"})
    assert {row.id: row.split for row in snapshot.pool()} == {
        identity: row.split for identity, row in whole.items() if identity not in named
    }
    accounting = snapshot.manifest["accounting"]
    assert accounting["set_aside"] == {reason: list(named.values()).count(reason) for reason in LEAVE_OUT}
    assert accounting["rows_in"] == 60 == accounting["trained"] + accounting["held_out"] + 20
    told = [one for one in read_json(snapshot.folder / REPORT)["problems"] if one["reason"] in LEAVE_OUT]
    assert {one["reason"]: one["rows"] for one in told} == accounting["set_aside"]


def test_another_choice_is_another_snapshot_and_the_same_one_is_found(
    write_rows: Callable[..., Path], chatml: Path
) -> None:
    path = write_rows(rows(30))
    whole = prepare(config(path), chatml)
    left = dict.fromkeys([row.id for row in whole.pool()][:2], "not-drawn")
    one, other = (prepare(config(path), chatml, leave_out=dict(each)) for each in (left.items(), [*left.items()][::-1]))
    assert one.folder == other.folder
    assert prepare(config(path), chatml, leave_out={}).hash == whole.hash != one.hash


def test_the_pool_knows_groups_and_whose_answers_they_are(write_rows: Callable[..., Path], chatml: Path) -> None:
    given = rows(60)
    for number, row in enumerate(given):
        row |= {"session_id": f"s{number // 3}", "user_id": "ada"}
    given[0] |= {"answered_by": "helpdesk@3", "feedback": 1}
    pool = list(prepare(config(write_rows(given)), chatml).pool())
    assert len({row.group_id for row in pool}) == 20
    assert [row.answered_by for row in pool].count("helpdesk@3") == 1
    assert {row.user for row in pool} == {"ada"}
    assert all(row.length > row.trained > 0 and len(row.numbers) == 1 for row in pool)


def test_it_waits_for_who_prepares_the_same_rows(write_rows: Callable[..., Path], chatml: Path) -> None:
    """A second run on the same rows."""
    chosen = config(write_rows(rows(40)))
    made = prepare_data(chosen, chatml)
    shutil.rmtree(made.folder)
    with contextlib.ExitStack() as other:
        other.enter_context(lock(home() / "snapshots" / f".work-{made.folder.name}"))
        with pytest.raises(Busy):
            prepare_data(chosen, chatml)
        waited: list[str] = []

        def wait(busy: Busy) -> None:
            waited.append(busy.message)
            other.close()

        assert prepare_data(chosen, chatml, on_busy=wait).hash == made.hash
    assert len(waited) == 1
    assert "is in use by process" in waited[0]
