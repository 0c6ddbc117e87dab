"""What each adapter of a family costs as it is served: memory beside the base, and tokens a second."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivetune.base.sealed import read_sealed, write_sealed
from hivetune.base.typed import from_plain, to_plain
from hivetune.data.render.dialect import template_message
from hivetune.errors import HivetuneError
from hivetune.llama.backend import Backend, ServerSettings, open_backend
from hivetune.llama.prompts import prompt_of
from hivetune.release.gguf import SERVED_QUANT, base_gguf
from hivetune.routing.choose import specialists_folder
from hivetune.serve.swap.wanted import load_release
from hivetune.specialists.survey import ALONE, Attended, Survey, serving

_COSTS = "costs.json"  # below the folder of the shared release
_QUESTIONS, _NEW_TOKENS = 5, 32  # of the test rows: 3 s a release with a model of 135M on two cores
_BASE = "base"


@dataclass(frozen=True)
class AdapterCost:
    """The cost of one release of a family, or of "base" alone.

    `memory_bytes`: its GGUF adapter, which llama.cpp keeps in memory beside the base. Tokens a second are of one answer
    at a time: of the prompt, and written.
    """

    label: str
    memory_bytes: int
    prompt_per_s: float
    written_per_s: float


@dataclass(frozen=True)
class FamilyCosts:
    """The costs of a family. `problem`: why nothing could be measured, in words."""

    costs: tuple[AdapterCost, ...] = ()
    problem: str = ""


def measure_costs(survey: Survey, attended: Attended = ALONE) -> FamilyCosts:
    """Measure the base, the shared adapter and each specialist that serves, in one server as the gateway runs it.

    Earlier figures of the same releases are reused. Without a serving specialist nothing is measured.
    """
    specialists, _ = serving(survey)
    releases = [survey.shared, *(s.release for s in specialists.values())]
    earlier = known_costs(survey.shared.name)
    if not specialists or [cost.label for cost in earlier] == [_BASE, *(release.label for release in releases)]:
        return FamilyCosts(earlier if specialists else ())
    attended.between()
    try:
        adapters = [load_release(release).adapter for release in releases]
        base = base_gguf(survey.config.model, survey.shared.model_sha256, SERVED_QUANT)
        with open_backend(base, ServerSettings(adapters=tuple((path, 0.0) for path in adapters))) as backend:
            rates = rates_of(backend, len(adapters), _questions(survey), attended)
    except HivetuneError as error:
        return FamilyCosts(problem=error.message)
    sizes = [0, *(path.stat().st_size for path in adapters)]
    labels = [_BASE, *(release.label for release in releases)]
    costs = tuple(AdapterCost(label, size, *rate) for label, size, rate in zip(labels, sizes, rates, strict=True))
    write_sealed(specialists_folder(survey.shared.name) / _COSTS, {"schema": 1, "costs": to_plain(costs)})
    return FamilyCosts(costs)


def known_costs(shared: str) -> tuple[AdapterCost, ...]:
    """Return the last measurements of this family; empty without any, or if the file is damaged."""
    path = specialists_folder(shared) / _COSTS
    try:
        return tuple(from_plain(AdapterCost, cost) for cost in read_sealed(path)["costs"]) if path.exists() else ()
    except (HivetuneError, KeyError, TypeError, ValueError):
        return ()


def rates_of(
    backend: Backend, adapters: int, questions: Sequence[Sequence[Mapping[str, Any]]], attended: Attended = ALONE
) -> list[tuple[float, float]]:
    """Return (tokens of the prompt, tokens written) a second: of the base, then of each adapter alone.

    Each is a median over the questions. All take turns, so that a slow moment of the machine meets all of them.
    """
    report = attended.bar("measuring what each adapter costs")
    turns = range(-1, adapters)
    measured: dict[int, list[tuple[float, float]]] = {number: [] for number in turns}
    for index, messages in enumerate(questions):
        for number in turns:
            measured[number].append(_rate(backend, adapters, number, messages))
            report(index * len(turns) + number + 2, len(questions) * len(turns))
    return [
        (statistics.median(prompt for prompt, _ in rates), statistics.median(written for _, written in rates))
        for rates in measured.values()
    ]


def _rate(backend: Backend, adapters: int, chosen: int, messages: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return llama.cpp's own rates for one answer of full length."""
    body = {
        "messages": list(messages),
        "max_tokens": _NEW_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "lora": [{"id": number, "scale": float(number == chosen)} for number in range(adapters)],
    }
    timings = backend.request("/v1/chat/completions", body)["timings"]
    return round(float(timings["prompt_per_second"]), 1), round(float(timings["predicted_per_second"]), 1)


def _questions(survey: Survey) -> list[list[dict[str, Any]]]:
    rows = [row.numbers[0] for row in survey.rows if row.split == "test"][:_QUESTIONS]
    infos = [survey.snapshot.info(number) for number in rows]
    return [[template_message(message) for message in prompt_of(info.messages)] for info in infos]
