"""A home with a tiny real model, rows that it can learn, and the loop as a process of its own."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from forks import FORKS
from serve.hive import MODEL, make_home

from hivetune.base.database import open_database
from hivetune.base.disk import home, read_json
from hivetune.base.journal import read_journal
from hivetune.cycle.record import cycles_of
from hivetune.release.registry import releases
from hivetune.run.folder import read_record

NAME = "demo"
WORDS = ("red", "blue", "green", "black", "white", "small", "large", "quick", "slow", "old", "new", "warm")


# Seconds of a few tokens of a tiny model on a busy machine say nothing of a release.
UNTIMED = (
    "from dataclasses import replace\nfrom hivetune.judge.verdict import KINDS\n"
    "KINDS['latency_s'] = replace(KINDS['latency_s'], limit=1e9)\n"
)
# Its model servers give way to nobody: beside other tests, which fill all cores, they would get 0.3 % of one
# (process/launch.py).
PROMPT = "from hivetune.llama import backend\nbackend.set_idle_priority = lambda pid: None\n"
# With the config, and by how many seconds its clock is ahead.
LOOP = (
    "import sys, time\nfrom pathlib import Path\nfrom hivetune.config import load_config\n"
    "from hivetune.cycle.loop import opened\n"
    "with opened(load_config(Path(sys.argv[1])), print) as loop:\n"
    "    loop.clock = lambda: time.time() + float(sys.argv[2])\n    loop.run(once=True)\n"
)


def make_rows(first: int, count: int, *, seed: int = 7) -> list[dict[str, Any]]:
    """Return questions with one kind of answer, each of another session, numbered from `first`."""
    rows = []
    for number in range(first, first + count):
        said = random.Random(seed * 100_003 + number)
        words = [said.choice(WORDS) for _ in range(4)]
        text = f"What comes after {' '.join(words)}? It is question {number}."
        answer = (
            f"After {words[-1]} comes {WORDS[(WORDS.index(words[-1]) + 1) % len(WORDS)]}, and {words[0]} was first."
        )
        rows.append(
            {
                "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}],
                "session_id": f"s{number}",
                "user_id": f"u{number % 17}",
            }
        )
    return rows


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def make_config(folder: Path, *, model: str = MODEL, **cycle: Any) -> Path:
    """Write `folder/cycle.yaml` and an empty `folder/rows.jsonl`. The tiny model lies in `$HIVETUNE_HOME`, unless
    another is named."""
    if model == MODEL:
        make_home()
    (folder / "rows.jsonl").touch()
    settings = {
        "model": model,
        "data": {"path": str(folder / "rows.jsonl"), "near_duplicates": 0},
        "lora": {"r": 4},
        "max_length": 256,
        "batch_size": 8,
        "epochs": 1,
        "learning_rate": 0.01,
        "dtype": "float32",
        "device": "cpu",
        "eval": {"prompts": 6, "tokens": 2},
        "cycle": {"name": NAME, "after_rows": 40, **cycle},
    }
    path = folder / "cycle.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def poisoned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same questions with each other's answers."""
    answers = [row["messages"][1] for row in rows]
    random.Random(1).shuffle(answers)
    return [{**row, "messages": [row["messages"][0], answer]} for row, answer in zip(rows, answers, strict=True)]


@dataclass(frozen=True)
class Kill:
    """A kill as the loop's journal says `border`, an event and a station: of the loop, or of a process that it started
    there."""

    border: tuple[str, str]
    way: Literal["at once", "a moment later", "a process below"] = "at once"
    delay_s: float = 0.0


@dataclass
class KilledLoop:
    """A loop that runs in a process of its own until there is nothing to do, is killed (SIGKILL) and started again.
    `forked`: from the tests' own server, as its tasks then are. `ahead_s`: of its clock, an hour more after each
    station that failed, by which its pause is over. `made`: kills by their way."""

    config: Path
    log: Path
    forked: bool = False
    ahead_s: float = 0.0
    made: Counter[str] = field(default_factory=Counter)

    def once(self, waiting: list[Kill]) -> None:
        """Run to the end. Kills whose border does not come are left in `waiting`."""
        for _ in range(1000):
            seen = len(self.lines())
            script, arguments = UNTIMED + LOOP, (str(self.config), str(self.ahead_s))
            with open(self.log, "a", encoding="utf-8") as log:
                if self.forked:
                    process = FORKS.start_script(PROMPT + script, *arguments, log=log)
                else:
                    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=log, stderr=log)
            if self._is_killed(process, seen, waiting):
                continue
            assert process.returncode == 0, self.log.read_text()[-3000:]
            decisions = [entry for entry in self.lines()[seen:] if entry["event"] == "decision"]
            if "is tried again" not in decisions[-1]["reason"]:
                return
            self.ahead_s += 3600
        raise AssertionError("it does not come to an end")

    def _is_killed(self, process: "subprocess.Popen[bytes]", seen: int, waiting: list[Kill]) -> bool:
        """Watch the loop to its end and return whether it was itself killed."""
        while process.poll() is None:
            for entry in self.lines()[seen:]:
                seen += 1
                border = (entry["event"], entry.get("station", ""))
                kill = next((each for each in waiting if each.border == border), None)
                if kill is None:
                    continue
                waiting.remove(kill)
                if kill.way == "a process below":
                    self.made[kill.way] += kill_below(process)
                    continue
                time.sleep(kill.delay_s)
                process.kill()
                process.wait()
                self.made[kill.way] += 1
                return True
            time.sleep(0.005)
        return False

    def lines(self) -> list[dict[str, Any]]:
        return [*read_journal(home() / "cycles" / NAME / "cycle.jsonl")]


def kill_below(process: "subprocess.Popen[bytes]") -> int:
    """Kill the first process that the loop starts in this station; return how many were killed."""
    while process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    return 1
        time.sleep(0.005)
    return 0


def summary() -> dict[str, Any]:
    """Return what must not depend on kills: cycles with their ends, releases and adapters, accounting, aliases."""
    with closing(open_database()) as database:
        found = cycles_of(database, NAME)
        known = releases(database, NAME)
    return {
        "cycles": [(one.id, one.end, one.champion) for one in found],
        "rows": [read_json(Path(read_record(one.run)["snapshot"]) / "manifest.json")["accounting"] for one in found],
        "releases": [(one.label, one.adapter_sha256, one.snapshot, one.verdict, one.aliases) for one in known],
    }
