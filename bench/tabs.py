"""What the dashboard costs the machine that trains, with seven tabs open.

    python bench/tabs.py [--seconds 30]                          processor time alone: also on a busy machine
    python bench/tabs.py --train CONFIG [--set a.b=c ...]        and seconds a step, on a quiet one

The tabs do what the pages do: ask for what changed, every three seconds, each on its own connection.

Processor time: a run of 100,000 steps grows by one step a second in a home with a cycle and releases, and the time of
the dashboard's process is taken as a share of all cores. That is what it can take from a training that uses every core.
Seconds a step: CONFIG is trained, the tabs are open in every other block of steps; each step is divided by its tokens,
each block by its neighbour: the median ratio with a 95 % interval. Prints one JSON document.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from dashboard.shown import Shown, add_step, dashboard, everything, make_run, supervisor  # noqa: E402

from hivetune.base.journal import Journal, read_journal  # noqa: E402
from hivetune.dashboard.live import LOOK_S  # noqa: E402
from hivetune.dashboard.watched import run_id  # noqa: E402
from hivetune.run.folder import METRICS  # noqa: E402

TABS = 7
LONG, SETTLE_S = 100_000, 12.0
SETTLE_STEPS = 1  # after each change: it falls into the middle of this step
RESAMPLES = 4000


class Tabs:
    """Seven tabs that look at a run, Now, Runs, Cycles and Releases."""

    def __init__(self, shown: Shown, run: Path):
        one = f"runs/{run_id(run)}"
        self._paths = (one, "", "runs", one, "cycles", "releases", one)[:TABS]
        self._shown, self._threads, self._ends = shown, [], threading.Event()
        self.bytes = 0

    def __enter__(self) -> "Tabs":
        self._threads = [threading.Thread(target=self._look, args=(path,), daemon=True) for path in self._paths]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(30)

    def _look(self, path: str) -> None:
        headers = {"Authorization": f"Bearer {self._shown.token}", "Accept": "application/json"}
        have = ""
        with httpx2.Client(timeout=30, headers=headers) as client:
            while not self._ends.wait(LOOK_S):
                answer = client.get(self._shown.url + path, params={"have": have})
                self.bytes += len(answer.content)
                have = answer.json()["have"]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=30.0)
    arguments.add_argument("--train", metavar="CONFIG")
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    arguments.add_argument("--block", type=int, default=8, help="steps with tabs, then as many without")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="hivetune-bench-") as scratch:
        found = processor_time(Path(scratch), given.seconds)
        if given.train:
            found |= measure(Path(scratch), given.train, given.overrides, given.block)
    print(json.dumps({"schema": 1, "tabs": TABS, "cores": os.cpu_count(), **found}, indent=1))


def processor_time(work: Path, seconds: float) -> dict[str, object]:
    kept = os.environ.get("HIVETUNE_HOME")
    os.environ["HIVETUNE_HOME"] = str(work / "home")
    everything()
    run = make_run("long", steps=LONG + 1000, done=LONG)
    began_s, step = 0.0, LONG
    with supervisor(run), dashboard(work / "dashboard.log") as shown, Tabs(shown, run) as tabs:
        server = psutil.Process(shown.process.pid)
        time.sleep(SETTLE_S)  # the first reading of 100,000 lines is no part of what an open page costs
        before, began_s, sent = sum(server.cpu_times()[:2]), time.monotonic(), tabs.bytes
        while time.monotonic() - began_s < seconds:
            step += 1
            with Journal(run / METRICS) as journal:
                add_step(journal, step)
            time.sleep(1.0)
        passed_s = time.monotonic() - began_s
        share = (sum(server.cpu_times()[:2]) - before) / passed_s / (os.cpu_count() or 1)
        found = {"load_average": os.getloadavg()[0], "share_of_all_cores": share, "seconds": passed_s}
        found |= {"bytes_per_s": (tabs.bytes - sent) / passed_s, "resident_bytes": server.memory_info().rss}
    if kept is None:
        del os.environ["HIVETUNE_HOME"]
    else:
        os.environ["HIVETUNE_HOME"] = kept
    return {"processor_time": found}


def measure(work: Path, config: str, overrides: list[str], block: int) -> dict[str, object]:
    run = work / "run"
    settings = [word for each in (*overrides, f"output={run}") for word in ("--set", each)]
    command = [sys.executable, "-m", "hivetune", "train", config, *settings]
    with open(work / "log", "w") as log, dashboard(work / "dashboard.log") as shown:
        training = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for_step(run, 1, training)
        blocks = []
        for number in range(10_000):
            first = newest(run)
            if number % 2:
                wait_for_step(run, first + block, training)
            else:
                with Tabs(shown, run):
                    wait_for_step(run, first + block, training)
            blocks.append((first + SETTLE_STEPS, newest(run), number % 2 == 0))
            if training.poll() is not None:
                break
    assert training.returncode == 0, (work / "log").read_text()
    steps = {e["step"]: e["seconds"] / e["tokens"] for e in read_journal(run / METRICS) if e["event"] == "step"}
    return {"training": {"load_average": os.getloadavg()[0], **compared(steps, blocks)}}


def compared(steps: dict[int, float], blocks: list[tuple[int, int, bool]]) -> dict[str, object]:
    """The ratio of seconds a token with tabs to those without, block by block beside its neighbour."""
    means = [
        (statistics.mean(steps[step] for step in range(first + 1, last + 1)), tabs)
        for first, last, tabs in blocks
        if last > first
    ]
    ratios = [
        (one if tabs else other) / (other if tabs else one) for (one, tabs), (other, _) in itertools.pairwise(means)
    ]
    chance = random.Random(0)
    resampled = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    ends = [resampled[round(share * RESAMPLES)] for share in (0.025, 0.975)]
    return {"pairs": len(ratios), "steps": len(steps), "step_ratio": statistics.median(ratios), "step_ratio_ci95": ends}


def newest(run: Path) -> int:
    return max((e["step"] for e in read_journal(run / METRICS) if e["event"] == "step"), default=0)


def wait_for_step(run: Path, step: int, training: "subprocess.Popen[bytes]") -> None:
    while newest(run) < step and training.poll() is None:
        time.sleep(0.25)


if __name__ == "__main__":
    main()
