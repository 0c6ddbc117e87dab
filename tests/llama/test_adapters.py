"""Adapters never mix: requests of three adapters and the base in turns, against the same requests alone."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serve.hive import add_release

from hivetune.llama.backend import Backend, ServerSettings, open_backend

pytestmark = pytest.mark.slow
# A long shared beginning, so that a cache has much to reuse wrongly.
PROMPTS = [f"You are a helpful assistant of the hive. Please answer as well as you can. Number {n}." for n in range(5)]
REQUESTS = 200
Scored = tuple[tuple[int, float], ...]  # token and its log-probability
# The same files in the same build, with another number of tokens computed at once: rounding of float16 and q8_0.
TOLERANCE_NATS = 0.02


@pytest.fixture
def files(own_home: Path, tmp_path: Path) -> tuple[Path, list[Path]]:
    for seed in (1, 2, 3):
        add_release(tmp_path, "a", seed)
    adapters = [next(tmp_path.glob(f"run-a-{seed}/export/gguf-adapter/*.gguf")) for seed in (1, 2, 3)]
    return next(own_home.glob("bases/*/*.gguf")), adapters


def answers(backend: Backend, order: list[tuple[int, int]]) -> Iterator[Scored]:
    """With the cache as the gateway uses it: on, in a slot that another adapter may have used just before."""
    for adapter, prompt in order:
        scales = [{"id": number, "scale": float(number == adapter)} for number in range(3)]
        body = {
            "messages": [{"role": "user", "content": PROMPTS[prompt]}],
            "max_tokens": 3,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 1,
            "lora": scales,
            "cache_prompt": True,
        }
        document = backend.request("/v1/chat/completions", body)
        choice = document["choices"][0]
        yield tuple((int(t["id"]), float(t["logprob"])) for t in choice["logprobs"]["content"])


def test_two_hundred_requests_in_turns_equal_those_alone(files: tuple[Path, list[Path]]) -> None:
    base, adapters = files
    settings = ServerSettings(adapters=tuple((path, 0.0) for path in adapters), slots=2, context_tokens=256, threads=1)
    kinds = [(adapter, prompt) for adapter in (0, 1, 2, -1) for prompt in range(len(PROMPTS))]
    alone = {}
    for adapter in (0, 1, 2, -1):
        with open_backend(base, replace(settings, slots=1)) as backend:
            own = [kind for kind in kinds if kind[0] == adapter]
            alone |= dict(zip(own, answers(backend, own), strict=True))
    assert len({alone[adapter, 0] for adapter in (0, 1, 2, -1)}) == 4  # they do answer differently
    order = random.Random(0).choices(kinds, k=REQUESTS)
    with open_backend(base, settings) as backend:
        for kind, answer in zip(order, answers(backend, order), strict=True):
            assert [token for token, _ in answer] == [token for token, _ in alone[kind]], kind
            for (_, now), (_, then) in zip(answer, alone[kind], strict=True):
                assert now == pytest.approx(then, abs=TOLERANCE_NATS), kind
