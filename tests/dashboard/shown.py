"""A home in which every page of the dashboard has something to show, made by the writers of the product itself."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import home, sha256_bytes, sha256_file, write_json, write_manifest
from hivetune.base.journal import Journal
from hivetune.config import DataConfig, parse_config
from hivetune.data.prepare.prepare import check
from hivetune.release.registry import Release, promote, register
from hivetune.run.choices import Choices
from hivetune.run.folder import EVENTS, METRICS, PLAN, write_record, write_resolved

# What a row, a name of a file or an answer may hold.
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>&lt;b&gt; "\'\u202egnp\x1b[31m'
SNAPSHOT = sha256_bytes(b"the snapshot")
ROWS = 120


def make_run(name: str, *, steps: int, done: int, status: str = "new", **settings: Any) -> Path:
    """Make a run folder in the home, known to hive.db, with `done` of its `steps` in its metrics."""
    folder = home() / "runs" / name
    folder.mkdir(parents=True)
    config = parse_config({"model": "tiny", "data": {"path": f"{HOSTILE}.jsonl"}, **settings}, "test")
    write_resolved(folder, config, Choices(device="cpu", dtype="float32", budget_tokens=512))
    write_json(folder / PLAN, {"schema": 1, "steps": steps})
    created, snapshot = time.time() - 60, str(home() / "snapshots/one")
    record = {"schema": 1, "name": name, "created": created, "status": status, "snapshot": snapshot}
    write_record(folder, record)
    with closing(open_database()) as database:
        database.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", (str(folder), name, created, SNAPSHOT))
    with Journal(folder / METRICS) as journal:
        for step in range(1, done + 1):
            add_step(journal, step)
    return folder


def add_step(journal: Journal, step: int) -> None:
    """Write a line as the worker does."""
    loss = 2.0 + 1.5 / step + random.Random(step).uniform(-0.2, 0.2)
    fields = {"grad_norm": 0.8, "lr": 1e-4, "tokens": 800, "trained_tokens": 200, "rows": 8, "seconds": 0.5}
    journal.append("step", step=step, loss=loss, **fields)
    if step % 10 == 0:
        journal.append("validation", step=step, loss=loss + 0.1, tokens=100, not_finite=0, seconds=0.1)


def end_run(folder: Path, status: str, steps: int) -> None:
    with Journal(folder / EVENTS) as events:
        events.append("supervisor_ended", status=status, steps=steps, restarts=1, rungs=[], why="")


def add_events(folder: Path) -> None:
    """Write the events of a supervisor that met a fault and a bad row with a hostile name."""
    with Journal(folder / EVENTS) as events:
        events.append("supervisor_started", boot_id="b", hivetune="0.1.0", fingerprint="f", versions={})
        events.append("attempt", number=1, pid=1, rungs=[], environment={})
        events.append("sample", available_bytes=8 << 30, disk_free_bytes=8 << 30, load=1.0, resident_bytes=900 << 20)
        events.append("failure", fault="oom", step=3, words=f"out of memory {HOSTILE}")
        events.append("action", action="retry", why="a smaller micro-batch", rungs=[], tried="")
        events.append("quarantined", source=f"{HOSTILE}.jsonl:7", reason="its loss is not finite")
        events.append("sample", available_bytes=8 << 30, disk_free_bytes=8 << 30, load=1.0, resident_bytes=950 << 20)
    (folder / "child.log").write_text(f"a line of the log {HOSTILE}\n")


def make_snapshot() -> Path:
    """Make a snapshot as far as the dashboard reads it: report and manifest."""
    folder = home() / "snapshots" / "one"
    folder.mkdir(parents=True)
    write_json(folder / "report.json", _report(home()))
    write_manifest(folder, {"hash": SNAPSHOT, "num_rows": ROWS, "num_tokens": 10 * ROWS})
    with closing(open_database()) as database:
        database.execute("INSERT INTO snapshots VALUES (?, ?, ?)", (SNAPSHOT, str(folder), time.time()))
    return folder


def add_release(run: Path, number: int, verdict: str = "deploy", *, champion: bool = False) -> Release:
    """Register the run as the next version of `helpdesk`, with an evaluation whose texts are hostile."""
    (run / "adapter_config.json").write_text("{}")
    (run / "adapter_model.safetensors").write_bytes(b"weights %d" % number)
    judged = {"verdict": verdict, "reasons": [f"it is better {HOSTILE}"], "metrics": _metrics()}
    write_json(run / "eval.json", {**evaluation(), **judged})
    about = {
        "model": "tiny",
        "model_sha256": "0" * 64,
        "adapter_sha256": sha256_file(run / "adapter_model.safetensors"),
        "snapshot": SNAPSHOT,
        "verdict": verdict,
        "proof": {},
        "judgement": judged,
        "data": {"snapshot": SNAPSHOT, "path": "snapshots/one", "rows": {}, "trained": 108, "held_out": 12},
        "settings": {},
        "machine": None,
        "hivetune": "0.1.0",
    }
    with closing(open_database()) as database:
        release, _ = register(database, run, "helpdesk", about, by="test")
        return promote(database, release.label, by="test", reason="first") if champion else release


def evaluation() -> dict[str, Any]:
    identity = [
        {"row": n, "id": str(n), "source": f"{HOSTILE}:{n}", "agent": "faq", "category": None, "group": str(n)}
        for n in range(6)
    ]
    side = {"answer": HOSTILE, "ended": True, "seconds": 1.0, "new_tokens": 9}
    texts = {"prompt": HOSTILE, "reference": HOSTILE, "checker": None}
    sides = {"base": {**side, "success": False}, "tuned": {**side, "success": True}}
    answers = [{**each, **texts, **sides} for each in identity]
    rows = [{**each, "tokens": 10, "base": 20.0 + number, "tuned": 15.0} for number, each in enumerate(identity)]
    empty = {"problems": [], "frozen": [], "not_compared": {}, "base": {"label": "base"}, "tuned": {}}
    return {"schema": 1, "rows": rows, "answers": answers, **empty}


def make_loop(name: str = "faq") -> Path:
    """Make a loop with a closed cycle and a decision."""
    folder = home() / "cycles" / name
    folder.mkdir(parents=True)
    with closing(open_database()) as database:
        database.execute(
            "INSERT INTO cycles (id, name, opened, opened_for, config, champion, closed, ending, reason)"
            " VALUES ('c1', ?, 1, 'rows', '{}', NULL, 2, 'refused', ?)",
            (name, f"the gate refused it {HOSTILE}"),
        )
    with Journal(folder / "cycle.jsonl") as journal:
        journal.append("end", cycle="c1", station="judge", outcome="done", words=HOSTILE)
        journal.append("decision", now=time.time(), do="wait", reason=f"12 of 200 new groups {HOSTILE}")
    return folder


def everything() -> Path:
    """Make two runs, a snapshot, two releases, a loop and an interaction. Returns the run that is not done."""
    make_snapshot()
    finished = make_run("finished", steps=40, done=40, status="done", learning_rate=3e-4)
    add_events(finished)
    end_run(finished, "done", 40)
    add_release(finished, 1, champion=True)
    add_release(finished, 2)
    make_loop()
    with closing(open_database()) as database:
        database.execute(
            "INSERT INTO interactions (id, content_id, source, user, row) VALUES ('i1', 'c', ?, ?, '{}')",
            (f"{HOSTILE}:1", HOSTILE),
        )
        database.execute("INSERT INTO intake VALUES (?, 1, 0, 0, 0)", (HOSTILE,))
    going = make_run("going", steps=200, done=30)
    add_events(going)
    return going


@contextmanager
def supervisor(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a process that holds the run as its supervisor does, until it is killed."""
    script = (
        "import sys, time; from pathlib import Path; from hivetune.base.disk import lock\n"
        "with lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait(30)


@dataclass
class Shown:
    """A dashboard that listens."""

    process: "subprocess.Popen[str]"
    url: str
    token: str

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].split("/")[0])


@contextmanager
def dashboard(log: Path, port: int = 0) -> Iterator[Shown]:
    """Run `hivetune dashboard` as its own process."""
    command = [sys.executable, "-m", "hivetune", "dashboard", "--port", str(port), "--json"]
    with open(log, "a", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        said = json.loads(line)
        yield Shown(process, said["url"], said["token"])
    finally:
        process.terminate()
        process.wait(30)


def _metrics() -> list[dict[str, Any]]:
    more = {"n": 30, "threshold": 0.0, "passed": True, "required": True, "level": 0.95, "needed": None}
    loss = {"name": "loss", "base": 2.0, "tuned": 1.5, "gain": 0.5, "interval": [0.3, 0.7]}
    success = {"name": "success", "base": 0.4, "tuned": 0.6, "gain": 0.2, "interval": [0.1, 0.3]}
    return [{**loss, **more}, {**success, **more}]


def _report(folder: Path) -> dict[str, Any]:
    """Return the report of real rows with hostile names, as `hivetune check` makes it."""
    rows = folder / f"{HOSTILE.replace('/', '')}.jsonl"
    tasks = [f"{HOSTILE} {number} {' '.join('abcdefghij'[number % 7 :])}" for number in range(9)]
    lines = [{"agent": HOSTILE, "task": task, "output": f"{n} {HOSTILE}"} for n, task in enumerate(tasks)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in (*lines, {"prompt": HOSTILE})), encoding="utf-8")
    return check(DataConfig(path=str(rows))).document
