"""What the dashboard costs a run on the same machine: a real training, seven tabs open in every other block of steps.

    python bench/tabs.py CONFIG [--set a.b=c ...] [--block 8]

CONFIG is trained into a new folder. The tabs are connections that do what the pages do: read their stream, and come
back two seconds after it ends. Two answers: seconds a step with the tabs and without them, in turns, each divided by
its tokens, as a ratio with a 95 % interval; and the processor time of the dashboard while they were open, as a share of
all cores, which bounds what it can take where every core is busy. Prints one JSON document.
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

from dashboard.shown import Shown, dashboard  # noqa: E402

from hivetune.base.journal import read_journal  # noqa: E402
from hivetune.dashboard.live import RETRY_S  # noqa: E402
from hivetune.dashboard.watched import run_id  # noqa: E402
from hivetune.run.folder import METRICS  # noqa: E402

TABS = 7
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
        headers = {"Authorization": f"Bearer {self._shown.token}", "Accept": "text/event-stream"}
        have = ""
        with httpx2.Client(timeout=30, headers=headers) as client:
            while not self._ends.is_set():
                with client.stream("GET", self._shown.url + path, params={"have": have}) as stream:
                    for line in stream.iter_lines():
                        self.bytes += len(line)
                        have = line.removeprefix("id: ") if line.startswith("id: ") else have
                        if self._ends.is_set():
                            break
                self._ends.wait(RETRY_S)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("config")
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    arguments.add_argument("--block", type=int, default=8, help="steps with tabs, then as many without")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="hivetune-bench-") as scratch:
        found = measure(Path(scratch), given.config, given.overrides, given.block)
    print(json.dumps({"schema": 1, "tabs": TABS, **found}, indent=1))


def measure(work: Path, config: str, overrides: list[str], block: int) -> dict[str, object]:
    run = work / "run"
    settings = [word for each in (*overrides, f"output={run}") for word in ("--set", each)]
    command = [sys.executable, "-m", "hivetune", "train", config, *settings]
    load_before = os.getloadavg()[0]
    with open(work / "log", "w") as log, dashboard(work / "dashboard.log") as shown:
        server = psutil.Process(shown.process.pid)
        training = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for_step(run, 1, training)
        blocks, cpu_s, open_s, sent = [], 0.0, 0.0, 0
        for number in range(10_000):
            first = newest(run)
            if number % 2:
                wait_for_step(run, first + block, training)
            else:
                before, began = sum(server.cpu_times()[:2]), time.monotonic()
                with Tabs(shown, run) as tabs:
                    wait_for_step(run, first + block, training)
                cpu_s, open_s = cpu_s + sum(server.cpu_times()[:2]) - before, open_s + time.monotonic() - began
                sent += tabs.bytes
            blocks.append((first + SETTLE_STEPS, newest(run), number % 2 == 0))
            if training.poll() is not None:
                break
        resident = server.memory_info().rss
    assert training.returncode == 0, (work / "log").read_text()
    steps = {e["step"]: e["seconds"] / e["tokens"] for e in read_journal(run / METRICS) if e["event"] == "step"}
    return {
        "cores": os.cpu_count(),
        "load_average": [load_before, os.getloadavg()[0]],
        "dashboard_cpu_share_of_all_cores": cpu_s / open_s / (os.cpu_count() or 1),
        "dashboard_cpu_s_per_s": cpu_s / open_s,
        "open_s": open_s,
        "bytes_per_s": sent / open_s,
        "dashboard_resident_bytes": resident,
        **compared(steps, blocks),
    }


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
