"""The check that the server builds the prompt that was trained on, token by token, on real conversations.

llama.cpp has its own Jinja, its own tokenizer and its own rules for first tokens. A model that is right in the trainer
and wrong when served has most often lost here (ggml-org/llama.cpp#7062, ollama/ollama#6823).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hivetune.data.render.dialect import template_message
from hivetune.data.render.renderer import Renderer
from hivetune.llama.backend import Backend
from hivetune.records import Example, Message

SHOWN_TOKENS = 6


@dataclass(frozen=True)
class PromptDifference:
    """One conversation whose prompts differ. `at` is the first token that does; texts begin there."""

    source: str
    at: int
    trained: str
    served: str


def compare_prompts(
    backend: Backend, renderer: Renderer, examples: Iterable[Example]
) -> tuple[int, list[PromptDifference]]:
    """Return (number of conversations that were compared, those that differ). Raises RenderError for one that can't
    be rendered."""
    checked, differences = 0, []
    for example in examples:
        asked = prompt_of(example.messages)
        trained = renderer.prompt(asked, example.tools)
        served = backend.prompt_ids([template_message(message) for message in asked], example.tools)
        checked += 1
        if trained != served:
            at = next((i for i, (a, b) in enumerate(zip(trained, served, strict=False)) if a != b), -1)
            at = at if at >= 0 else min(len(trained), len(served))
            shown = [renderer.decode(ids[at : at + SHOWN_TOKENS]) for ids in (trained, served)]
            differences.append(PromptDifference(example.source, at, *shown))
    return checked, differences


def prompt_of(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages before the last answer."""
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=len(messages))
    return tuple(messages[:last])
