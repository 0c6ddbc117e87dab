"""A few answers of a release as the served files give them, recorded at registration and compared before a swap.

They find a file that was exchanged, an adapter on another base, and a broken build of llama.cpp. They do not prove that
the answers are good; the gate did.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.errors import HivetuneError
from hivetune.llama.backend import Backend

RECORDED_PROMPTS = 3
NUM_TOKENS = 16
# Nats. The same files on another processor or build differ by hundredths, another adapter by 0.5 and more.
MAX_DIFFERENCE = 0.25

Recorded = Mapping[str, Any]


def record_answers(
    backend: Backend, chats: Sequence[Sequence[Mapping[str, Any]]], adapter: int
) -> list[dict[str, Any]]:
    """Return the first tokens of greedy answers, with their log-probabilities."""
    answers = []
    for messages in chats[:RECORDED_PROMPTS]:
        answer = backend.complete(messages, max_tokens=NUM_TOKENS, logprobs=True, adapter=adapter)
        answers.append({"messages": list(messages), "tokens": [list(pair) for pair in answer.logprobs]})
    return answers


def compare_answers(backend: Backend, recorded: Sequence[Recorded], adapter: int, label: str) -> None:
    """Raise HivetuneError when `label` does not answer as it did. Compared are the median difference of its
    log-probabilities over the tokens that both begin with, and the first tokens of the answers."""
    differences: list[float] = []
    others = 0
    for entry in recorded:
        now = backend.complete(entry["messages"], max_tokens=NUM_TOKENS, logprobs=True, adapter=adapter).logprobs
        then = [(int(token), float(logprob)) for token, logprob in entry["tokens"]]
        others += not now or not then or now[0][0] != then[0][0]
        for (token, logprob), (known, known_logprob) in zip(now, then, strict=False):
            if token != known:
                break
            differences.append(abs(logprob - known_logprob))
    if recorded and (2 * others > len(recorded) or (differences and statistics.median(differences) > MAX_DIFFERENCE)):
        raise HivetuneError(
            f"{label} does not answer as it did when it was registered",
            hint="restore its files and its base from a backup, or register the run again",
        )
