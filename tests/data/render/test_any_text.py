"""Whatever people write, what is trained is their answer and nothing else, behind the prompt that a server makes."""

import pytest
from data.models import FAMILIES, corpus, make_model, template_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.render.template import RenderError
from hivetune.records import Example, Message

NAMES = ("qwen3", "llama3_2", "gpt_oss", "glm4_6", "deepseek_r1_distill", "nemotron3_nano", "mistral_nemo", "gemma4")
PIECES = (
    "\n",
    " ",
    "</think>",
    "<think>",
    "<|im_end|>",
    "assistant",
    '"',
    "\\",
    "{{ x }}",
    "{% if %}",
    "Xq00000Xq",
    "é👋",
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=12)), min_size=1, max_size=6).map("".join)
# A mark in a text of the row, a border inside a token, a text that the template cuts: each is said.
SAID = {"not-in-template", "no-trained-token", "end-not-trained"}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    families, root = {**FAMILIES, **corpus()}, tmp_path_factory.mktemp("any")
    return {name: load_renderer(make_model(root / name, template_of(name), families[name])) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS.filter(lambda text: text.strip() != ""), min_size=2, max_size=4))
def test_what_is_trained_is_the_answer(name: str, renderers: dict[str, Renderer], texts: list[str]) -> None:
    renderer = renderers[name]
    texts = texts[: len(texts) // 2 * 2]
    if any(token in text for text in texts for token in renderer.control_tokens):
        return  # the check for control tokens refuses such rows before they are rendered
    said = [text if i % 2 else f"{text}Question{i}" for i, text in enumerate(texts)]
    messages = tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(said))
    try:
        views = renderer.render(Example("", "", messages))
    except RenderError as error:
        assert error.reason in SAID
        return
    assert [i for view in views for i in view.answers] == list(range(1, len(messages), 2))
    for view in views:
        prompt = renderer.prompt(messages[: view.num_messages - 1])
        assert view.tokens[: len(prompt)] == prompt
        trained = renderer.decode(view.tokens[len(prompt) :])
        answer = messages[view.num_messages - 1].content
        behind_thought = answer.partition("</think>")[2] if answer.lstrip().startswith("<think>") else answer
        assert behind_thought.strip() in trained
        assert "Question" not in trained
