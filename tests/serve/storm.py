"""Many clients at once while releases change and model servers are killed; the outcome of every request."""

import contextlib
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
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
    """Send `requests` from `clients` threads over all APIs, half of them streamed, with `swaps` promotions and `kills`
    of a model server spread over them. Every fifth swap is to a new release, so to another process."""
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
                outcome, label, text, identity = _ask(client, "helpdesk", prompt, stream=stream, api=draw.choice(APIS))
                with guard:
                    _record(outcomes, prompt, stream, outcome, label, text, identity)

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


@dataclass(frozen=True)
class Api:
    """How the storm speaks an API: where, what else than model and stream it sends, and where answers have their text:
    a whole one, and a piece of a stream. `last`: what the last event of a stream says."""

    path: str
    body: Callable[[str], dict[str, Any]]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str]
    last: Callable[[Any], bool]


def _turns(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


APIS = (
    Api(
        "/v1/chat/completions",
        lambda prompt: {"messages": _turns(prompt), "max_tokens": 2, "temperature": 0},
        lambda told: told["choices"][0]["message"]["content"],
        lambda event: "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())),
        lambda event: event == {},
    ),
    Api(
        "/v1/messages",
        lambda prompt: {"messages": _turns(prompt), "max_tokens": 2},
        lambda told: "".join(block["text"] for block in told["content"]),
        lambda event: event.get("delta", {}).get("text", ""),
        lambda event: event.get("type") == "message_stop",
    ),
    Api(
        "/v1/responses",
        lambda prompt: {"input": prompt, "max_output_tokens": 2},
        lambda told: "".join(item["content"][0]["text"] for item in told["output"]),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda event: event.get("type") in ("response.completed", "response.incomplete"),
    ),
    Api(
        "/api/chat",
        lambda prompt: {"messages": _turns(prompt), "options": {"num_predict": 2}},
        lambda told: told["message"]["content"],
        lambda event: event["message"]["content"],
        lambda event: event.get("done") is True,
    ),
)


def _ask(client: httpx2.Client, model: str, prompt: str, *, stream: bool, api: Api = APIS[0]) -> tuple[str, ...]:
    """Return (outcome, label, text, id). The outcome is whole, broken (a stream that ended with an error event) or
    lost."""
    body = {"model": model, "stream": stream, **api.body(prompt)}
    try:
        if not stream:
            response = client.post(api.path, json=body)
            if response.status_code != 200:
                return "lost", "", response.text, ""
            document = response.json()
            return "whole", document["model"], api.whole(document), document["id"]
        with client.stream("POST", api.path, json=body) as response:
            if response.status_code != 200:
                return "lost", "", response.read().decode(), ""
            return _collect(api, list(_events(response)))
    except httpx2.HTTPError as error:
        return "lost", "", f"{type(error).__name__}: {error}", ""


def _events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, of lines of JSON or of server-sent events; [DONE] as an empty one."""
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]" or data.startswith("{"):
            yield {} if data == "[DONE]" else json.loads(data)


def _collect(api: Api, events: list[dict[str, Any]]) -> tuple[str, ...]:
    if not events:
        return "lost", "", "an empty stream", ""
    last = events[-1]
    if not api.last(last):
        is_told = "error" in last or last.get("type") == "response.failed"
        return ("broken" if is_told else "lost"), "", json.dumps(last), ""
    named = [
        event.get("message") if "id" in event.get("message", {}) else event.get("response", event) for event in events
    ]
    names = {(each["model"], each["id"]) for each in named if "id" in each}
    assert len(names) == 1
    ((label, identity),) = names
    return "whole", label, "".join(api.piece(event) for event in events), identity


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
