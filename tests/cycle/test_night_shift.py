"""A real night shift, six minutes long: it ends with its window, and a user who comes back is answered at once.

Only `make proof NAME=cycle-night`: SmolLM2-135M is trained by the loop and served by the gateway at the same time.
"""

import json
import statistics
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest
import yaml
from cycle.small import NAME, append_rows, make_config, make_rows, summary
from serve.hive import Running, gateway

from hivetune.base.disk import home
from hivetune.base.journal import read_journal

pytestmark = pytest.mark.proof

# Training goes on beside the answers, at the idle priority: it has to be in the middle of a step whenever a user asks.
WINDOW_MINUTES, ASK_EVERY_S = 6, 10.0
FIRST_ROWS, ROWS = 120, 8_000  # the second more than the window is long enough for
LATE_S, OVERRUN = 1.0, 0.01
FIRST_S = 1200  # for the first cycle, which has no window


def write_settings(path: Path, **changes: Any) -> None:
    """Write the config with other values; those of `cycle` are added to its own."""
    settings = yaml.safe_load(path.read_text())
    settings["cycle"] |= changes.pop("cycle", {})
    path.write_text(yaml.safe_dump(settings | changes))


def first_token_s(running: Running, number: int) -> float:
    """Return the seconds from a question to the first piece of its answer."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": f"What comes after small red? It is question {number}."}],
        "max_tokens": 12,
        "stream": True,
    }
    started = time.monotonic()
    with running.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        found = None
        for line in answer.iter_lines():
            if (
                found is None
                and line.startswith("data: {")
                and json.loads(line[6:])["choices"][0]["delta"].get("content")
            ):
                found = time.monotonic() - started
    assert found is not None
    return found


class Watched:
    """When a process of the loop was last seen, and whether one was there at a moment."""

    def __init__(self, loop: "subprocess.Popen[bytes]"):
        self.loop, self.last_s, self._ended = psutil.Process(loop.pid), 0.0, Event()
        self._thread = Thread(target=self._watch)
        self._thread.start()

    def works(self) -> bool:
        return bool(self.loop.children(recursive=True))

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            if self.works():
                self.last_s = time.time()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def test_it_ends_with_its_window_and_users_do_not_wait(
    smollm2: Path, own_home: Path, tmp_path: Path, record_property: Any
) -> None:
    config = make_config(tmp_path, model=str(smollm2))
    write_settings(config, learning_rate=0.001)
    append_rows(tmp_path / "rows.jsonl", make_rows(0, FIRST_ROWS))
    once = [sys.executable, "-m", "hivetune", "cycle", str(config), "--once"]
    subprocess.run(once, check=True, timeout=FIRST_S)
    assert summary()["cycles"][0][1] == "promoted"
    append_rows(tmp_path / "rows.jsonl", make_rows(FIRST_ROWS, ROWS))
    with gateway(tmp_path / "gateway.log") as running:
        first_token_s(running, 0)
        alone = statistics.median(first_token_s(running, number) for number in range(1, 8))
        begins = datetime.now().replace(second=0, microsecond=0)
        ends = begins + timedelta(minutes=WINDOW_MINUTES)
        write_settings(config, cycle={"window": f"{begins:%H:%M}-{ends:%H:%M}"})
        with open(tmp_path / "loop.log", "wb") as log:
            loop = subprocess.Popen([sys.executable, "-m", "hivetune", "cycle", str(config)], stdout=log, stderr=log)
        watched, waits = Watched(loop), []
        try:
            while time.time() < ends.timestamp() - ASK_EVERY_S:
                time.sleep(ASK_EVERY_S)
                assert loop.poll() is None, (tmp_path / "loop.log").read_text()[-3000:]
                if watched.works():
                    waits.append(first_token_s(running, 100 + len(waits)))
            time.sleep(max(0.0, ends.timestamp() - time.time()) + 20)
            assert not watched.works()
        finally:
            watched.end()
            loop.terminate()
            loop.wait(30)
    paused = [
        entry for entry in read_journal(home() / "cycles" / NAME / "cycle.jsonl") if entry.get("outcome") == "paused"
    ]
    overrun_s = watched.last_s - ends.timestamp()
    record_property("window_s", 60 * WINDOW_MINUTES)
    record_property("overrun_s", round(overrun_s, 2))
    record_property("questions beside training", len(waits))
    record_property("first token alone, median, s", round(alone, 3))
    record_property("first token beside training, median, s", round(statistics.median(waits), 3))
    record_property("first token beside training, longest, s", round(max(waits), 3))
    assert paused and "window" in paused[-1]["words"]
    assert len(waits) >= 10
    assert max(waits) - alone <= LATE_S
    assert overrun_s <= OVERRUN * 60 * WINDOW_MINUTES
    assert overrun_s > -0.2 * 60 * WINDOW_MINUTES  # what the window has is used
