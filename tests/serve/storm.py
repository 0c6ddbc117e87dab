"""Many clients at once while releases change and model servers are killed; the outcome of every request."""

import contextlib
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from serve.hive import Running, add_release, wait_until

from hivetune.base.database import open_database
from hivetune.release.registry import promote

PROMPTS = ("hello", "what is a hive", "name three trees")


@dataclass
class Outcomes:
    """The outcomes of the requests of all clients. `answers`: (label, prompt, streamed) and text of each whole one."""

    answers: list[tuple[tuple[str, str, bool], str]] = field(default_factory=list)
    broken: int = 0
    lost: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    @property
    def num(self) -> int:
        return len(self.answers) + self.broken + len(self.lost)


def storm(running: Running, work: Path, *, requests: int, clients: int, swaps: int, kills: int) -> Outcomes:
    """Send `requests` from `clients` threads, half of them streamed, with `swaps` promotions and `kills` of a model
    server spread over them. Every fifth swap is to a new release, so to another process."""
    outcomes, left = Outcomes(), iter(range(requests))
    guard = threading.Lock()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        with running.client() as client:
            while True:
                with guard:
                    if next(left, None) is None:
                        return
                prompt = draw.choice(PROMPTS)
                stream = draw.random() < 0.5
                answer = _ask(client, "helpdesk", prompt, stream=stream)
                with guard:
                    _record(outcomes, prompt, stream, *answer)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    _disturb(running, work, outcomes, requests, swaps, kills)
    for thread in threads:
        thread.join()
    return outcomes


def _disturb(running: Running, work: Path, outcomes: Outcomes, requests: int, swaps: int, kills: int) -> None:
    """Make the disturbances in order, each when its share of the requests is done."""
    things = ["swap"] * swaps + ["kill"] * kills
    random.Random(0).shuffle(things)
    labels = ["helpdesk@1", "helpdesk@2"]
    done = 0
    for number, thing in enumerate(things, 1):
        due = requests * number // (len(things) + 1)
        wait_until(lambda due=due: outcomes.num >= due, timeout_s=1800)
        if thing == "kill":
            for pid in running.backends():  # the one that answers, and what is kept of the one before
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            continue
        done += 1
        if done % 5 == 0:
            labels.append(add_release(work, "helpdesk", 2 + len(labels), champion=True))
            continue
        with closing(open_database()) as database:
            target = labels[done % len(labels)]
            promote(database, target, by="test", reason="storm", force=True)


def _ask(client: httpx2.Client, model: str, prompt: str, *, stream: bool) -> tuple[str, str, str, str]:
    """Return (outcome, label, text, id). The outcome is whole, broken (a stream that ended with an error event) or
    lost."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0, "stream": stream}
    try:
        if not stream:
            response = client.post("/v1/chat/completions", json=body)
            if response.status_code != 200:
                return "lost", "", response.text, ""
            document = response.json()
            return "whole", document["model"], document["choices"][0]["message"]["content"], document["id"]
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return "lost", "", response.read().decode(), ""
            return _collect(list(_events(response)))
    except httpx2.HTTPError as error:
        return "lost", "", f"{type(error).__name__}: {error}", ""


def _events(response: httpx2.Response) -> Iterator[dict[str, Any] | None]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield None if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))


def _collect(events: list[dict[str, Any] | None]) -> tuple[str, str, str, str]:
    if not events:
        return "lost", "", "an empty stream", ""
    if events[-1] is not None:
        return ("broken" if "error" in events[-1] else "lost"), "", json.dumps(events[-1]), ""
    chunks = [event for event in events if event is not None]
    labels, ids = {chunk["model"] for chunk in chunks}, {chunk["id"] for chunk in chunks}
    assert len(labels) == len(ids) == 1
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return "whole", labels.pop(), text, ids.pop()


def _record(outcomes: Outcomes, prompt: str, stream: bool, outcome: str, label: str, text: str, identity: str) -> None:
    if outcome == "whole":
        outcomes.answers.append(((label, prompt, stream), text))
        assert identity not in outcomes.ids
        outcomes.ids.add(identity)
    elif outcome == "broken":
        outcomes.broken += 1
    else:
        outcomes.lost.append(text)


def truth_of(running: Running, outcomes: Outcomes) -> dict[tuple[str, str, bool], str]:
    """Return each release's answers to each prompt when nobody else asks, promoted for it: only then it is loaded. A
    stream leaves out a character that is cut at the last token; a whole answer has a mark for it."""
    found = {}
    with running.client() as client:
        for label in sorted({label for (label, _, _), _ in outcomes.answers}):
            with closing(open_database()) as database:
                promote(database, label, by="test", reason="truth", force=True)
            wait_until(lambda label=label: _ask(client, "helpdesk", PROMPTS[0], stream=False)[1] == label)
            for prompt, stream in {
                (prompt, stream) for (asked, prompt, stream), _ in outcomes.answers if asked == label
            }:
                outcome, _, found[label, prompt, stream], _ = _ask(client, label, prompt, stream=stream)
                assert outcome == "whole"
    return found


def counts(outcomes: Outcomes) -> dict[str, int]:
    """Return the counts by outcome and by release."""
    by_release = Counter(label for (label, _, _), _ in outcomes.answers)
    return {"whole": len(outcomes.answers), "broken": outcomes.broken, "lost": len(outcomes.lost), **by_release}
