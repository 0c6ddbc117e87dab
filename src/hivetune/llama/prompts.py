"""The check that a server's prompts have the token ids of training, on conversations of a snapshot."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from hivetune.data.render.dialect import template_message
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.snapshot import Snapshot
from hivetune.errors import HivetuneError
from hivetune.llama.backend import Backend
from hivetune.records import Example, Message, Split

# llama.cpp has its own Jinja, its own tokenizer and its own rules for first tokens. A model that is right in the
# trainer and wrong when served has most often lost here (ggml-org/llama.cpp#7062, ollama/ollama#6823).
HELD_OUT_FIRST: tuple[Split, ...] = ("test", "validation", "train")
CHECKED_PROMPTS = 50
SHOWN_TOKENS = 6


def check_prompts(backend: Backend, model: Path, snapshot: Snapshot) -> int:
    """Compare the server's token ids of conversations with the trained ones, held-out conversations first. Return the
    number of conversations compared.

    Raises HivetuneError if one differs, because the server would then ask the model in another form than it was trained
    on.
    """
    rows = [row for split in HELD_OUT_FIRST for row in snapshot.rows(split)]
    infos = [snapshot.info(row) for row in rows[:CHECKED_PROMPTS]]
    examples = [Example(info.id, info.source, tuple(info.messages), tools=tuple(info.tools)) for info in infos]
    checked, differences = compare_prompts(backend, load_renderer(model), examples)
    if differences:
        raise HivetuneError(
            f"llama.cpp builds prompts that differ from training for {len(differences)} of {checked} conversations: "
            f"{differences[0]}",
            hint="please report it with the model's name; hivetune export --no-check keeps the file",
        )
    return checked


def compare_prompts(backend: Backend, renderer: Renderer, examples: Iterable[Example]) -> tuple[int, list[str]]:
    """Return the number of conversations that were compared, and a description of each difference. Raises RenderError
    for a conversation that can't be rendered.
    """
    checked, differences = 0, []
    for example in examples:
        prompt = prompt_of(example.messages)
        trained = renderer.prompt(prompt, example.tools)
        served = backend.prompt_ids([template_message(message) for message in prompt], example.tools)
        checked += 1
        if trained != served:
            shortest = min(len(trained), len(served))
            at = next((i for i in range(shortest) if trained[i] != served[i]), shortest)
            was, now = (renderer.decode(ids[at : at + SHOWN_TOKENS]) for ids in (trained, served))
            differences.append(f"{example.source}, token {at}: trained {was!r}, served {now!r}")
    return checked, differences


def prompt_of(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages before the last answer."""
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=len(messages))
    return tuple(messages[:last])
