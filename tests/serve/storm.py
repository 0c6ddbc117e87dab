"""Many clients at once while releases change and model servers are killed; the outcome of every request."""

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from serve.hive import Running, add_release, wait_until

from hivetune.base.database import open_database
from hivetune.release.registry import promote

PROMPTS = ("hello", "what is a hive", "name three trees")


class Outcome(NamedTuple):
    """What became of a request. `kind`: whole, broken (a stream that ended with an error event) or lost. `text`: of the
    answer, or why there is none."""

    kind: str
    text: str
    label: str = ""
    id: str = ""


Asked = tuple[str, bool]  # a prompt, and whether its answer is a stream


def storm(
    running: Running, work: Path, *, requests: int, clients: int, swaps: int, kills: int
) -> list[tuple[Asked, Outcome]]:
    """Send `requests` from `clients` threads over all APIs, half of them streamed, with `swaps` promotions and `kills`
    of a model server spread over them. Every fifth swap is to a new release, so to another process."""
    outcomes: list[tuple[Asked, Outcome]] = []
    left = iter(range(requests))
    guard = threading.Lock()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        with running.client() as client:
            while True:
                with guard:
                    if next(left, None) is None:
                        return
                prompt, stream = draw.choice(PROMPTS), draw.random() < 0.5
                outcome = _ask(client, "helpdesk", prompt, stream=stream, api=draw.choice(APIS))
                outcomes.append(((prompt, stream), outcome))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    # The disturbances in order, each when its share of the requests is done.
    things = ["swap"] * swaps + ["kill"] * kills
    random.Random(0).shuffle(things)
    labels, done = ["helpdesk@1", "helpdesk@2"], 0
    for number, thing in enumerate(things, 1):
        due = requests * number // (len(things) + 1)
        wait_until(lambda due=due: len(outcomes) >= due, timeout_s=1800)
        done += thing == "swap"
        if thing == "kill":
            for pid in running.backends():  # the one that answers, and what is kept of the one before
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif done % 5 == 0:
            labels.append(add_release(work, "helpdesk", 2 + len(labels), champion=True))
        else:
            _promote(labels[done % len(labels)])
    for thread in threads:
        thread.join()
    return outcomes


def _promote(label: str) -> None:
    with closing(open_database()) as database:
        promote(database, label, by="test", reason="storm", force=True)


@dataclass(frozen=True)
class Api:
    """How the storm speaks an API: where, the name of what it asks, that of its limit, and where answers have their
    text: a whole one, and a piece of a stream. `last`: what the last event of a stream says."""

    path: str
    limit: dict[str, Any]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str]
    last: Callable[[Any], bool]

    def body(self, prompt: str) -> dict[str, Any]:
        turns = [{"role": "user", "content": prompt}]
        return {"input": prompt, **self.limit} if "responses" in self.path else {"messages": turns, **self.limit}


APIS = (
    Api(
        "/v1/chat/completions",
        {"max_tokens": 2, "temperature": 0},
        lambda told: told["choices"][0]["message"]["content"],
        lambda event: "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())),
        lambda event: event == {},
    ),
    Api(
        "/v1/messages",
        {"max_tokens": 2},
        lambda told: "".join(block["text"] for block in told["content"]),
        lambda event: event.get("delta", {}).get("text", ""),
        lambda event: event.get("type") == "message_stop",
    ),
    Api(
        "/v1/responses",
        {"max_output_tokens": 2},
        lambda told: "".join(item["content"][0]["text"] for item in told["output"]),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda event: event.get("type") in ("response.completed", "response.incomplete"),
    ),
    Api(
        "/api/chat",
        {"options": {"num_predict": 2}},
        lambda told: told["message"]["content"],
        lambda event: event["message"]["content"],
        lambda event: event.get("done") is True,
    ),
)


def _ask(client: httpx2.Client, model: str, prompt: str, *, stream: bool, api: Api = APIS[0]) -> Outcome:
    try:
        with client.stream("POST", api.path, json={"model": model, "stream": stream, **api.body(prompt)}) as response:
            if response.status_code != 200:
                return Outcome("lost", response.read().decode())
            if stream:
                return _collect(api, list(_events(response)))
            document = json.loads(response.read())
            return Outcome("whole", api.whole(document), document["model"], document["id"])
    except httpx2.HTTPError as error:
        return Outcome("lost", f"{type(error).__name__}: {error}")


def _events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, of lines of JSON or of server-sent events; [DONE] as an empty one."""
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]" or data.startswith("{"):
            yield {} if data == "[DONE]" else json.loads(data)


def _collect(api: Api, events: list[dict[str, Any]]) -> Outcome:
    if not events:
        return Outcome("lost", "an empty stream")
    last = events[-1]
    if not api.last(last):
        is_told = "error" in last or last.get("type") == "response.failed"
        return Outcome("broken" if is_told else "lost", json.dumps(last))
    named = [
        event.get("message") if "id" in event.get("message", {}) else event.get("response", event) for event in events
    ]
    ((label, identity),) = {(each["model"], each["id"]) for each in named if "id" in each}
    return Outcome("whole", "".join(api.piece(event) for event in events), label, identity)


def truth_of(running: Running, asked: set[tuple[str, Asked]]) -> dict[tuple[str, Asked], str]:
    """Return each release's answers to each prompt when nobody else asks, promoted for it: only then it is loaded. A
    stream leaves out a character that is cut at the last token; a whole answer has a mark for it."""
    found = {}
    with running.client() as client:
        for label in sorted({label for label, _ in asked}):
            _promote(label)
            wait_until(lambda label=label: _ask(client, "helpdesk", PROMPTS[0], stream=False).label == label)
            for prompt, stream in {about for each, about in asked if each == label}:
                outcome = _ask(client, label, prompt, stream=stream)
                assert outcome.kind == "whole"
                found[label, (prompt, stream)] = outcome.text
    return found
