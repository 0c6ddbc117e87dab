"""What is trained of a row, as texts that are written down by hand. test_corpus.py compares with transformers."""

from pathlib import Path

import pytest
from data.models import CHATML, make_family, make_model

from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.render.template import RenderError
from hivetune.errors import UsageError
from hivetune.records import Example, Message, Rendered

TWO_TURNS = (
    ("user", "Hi"),
    ("assistant", "Hello. What now?"),
    ("user", "Bye é 你好"),
    ("assistant", "So long 👋!"),
)
WITH_SYSTEM = (
    ("system", "Be brief."),
    ("user", "Why?"),
    ("assistant", "Because."),
    ("user", "?"),
    ("assistant", "!"),
)


def example(turns: tuple[tuple[str, str], ...], weights: tuple[float, ...] = ()) -> Example:
    messages = []
    for i, (role, content) in enumerate(turns):
        messages.append(Message(role, content, weight=weights[i] if weights else 1.0))  # type: ignore[arg-type]
    return Example("", "here:1", tuple(messages))


def trained_text(renderer: Renderer, rendered: Rendered) -> str:
    return renderer.decode([t for t, k in zip(rendered.tokens, rendered.trained, strict=True) if k])


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: load_renderer(make_family(root / name, name))
        for name in ("qwen2_5", "qwen3", "llama3", "llama3_2", "mistral")
    }


def test_a_template_that_drops_the_system_prompt_once_it_is_answered_is_trained_as_served(
    renderers: dict[str, Renderer],
) -> None:
    """Mistral 0.3 writes it into a question that comes last only: each prompt has it in its newest question."""
    said = [renderers["mistral"].decode(view.tokens) for view in renderers["mistral"].render(example(WITH_SYSTEM))]
    assert said == [
        "<s>[INST] Be brief.\n\nWhy?[/INST] Because.</s>",
        "<s>[INST] Why?[/INST] Because.</s>[INST] Be brief.\n\n?[/INST] !</s>",
    ]


def test_a_template_that_rewrites_questions_trains_each_answer_as_served(tmp_path: Path) -> None:
    """The system prompt in the newest question: earlier prompts were never served as they stand in the whole text."""
    template = (
        "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m == asked[-1] and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    renderer = load_renderer(make_model(tmp_path, template))
    views, changed = renderer.render_and_note(example(WITH_SYSTEM))
    assert changed == ["turn-by-turn"]
    assert [trained_text(renderer, view) for view in views] == ["Because.<|im_end|>", "!<|im_end|>"]
    assert ["Be brief. ?" in renderer.decode(view.tokens) for view in views] == [False, True]


def test_thinking_that_is_dropped_from_earlier_turns_is_trained_where_it_is_new(renderers: dict[str, Renderer]) -> None:
    turns = (
        ("user", "1+1?"),
        ("assistant", "<think>\nadd\n</think>\n\n2"),
        ("user", "2+2?"),
        ("assistant", "<think>\nadd again\n</think>\n\n4"),
    )
    first, last = renderers["qwen3"].render(example(turns))
    assert trained_text(renderers["qwen3"], first) == "<think>\nadd\n</think>\n\n2<|im_end|>"
    assert trained_text(renderers["qwen3"], last) == "<think>\nadd again\n</think>\n\n4<|im_end|>"
    assert "add\n" not in renderers["qwen3"].decode(last.tokens)


def tool_row() -> Example:
    call = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": parameters}}
    messages = (
        Message("user", "Weather in Köln?"),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "rain", tool_call_id="c1", name="weather"),
        Message("assistant", "It rains."),
    )
    return Example("", "here:1", messages, tools=(tool,))


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        (
            "qwen2_5",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>'
            "It rains.<|im_end|>",
        ),
        (
            "qwen3",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>'
            "<think>\n\n</think>\n\nIt rains.<|im_end|>",
        ),
        ("llama3_2", '{"name": "weather", "parameters": {"city": "Köln"}}<|eot_id|>It rains.<|eot_id|>'),
    ],
)
def test_tool_calls_are_trained_and_results_are_not(name: str, trained: str, renderers: dict[str, Renderer]) -> None:
    kept = "".join(trained_text(renderers[name], view) for view in renderers[name].render(tool_row()))
    assert kept.replace("<think>\n\n</think>\n\n<tool_call>", "<tool_call>") == trained


def test_weight_0_is_read_but_not_trained(renderers: dict[str, Renderer]) -> None:
    row = example(TWO_TURNS, weights=(1, 0, 1, 1))
    (rendered,) = renderers["llama3"].render(row)
    assert trained_text(renderers["llama3"], rendered) == "So long 👋!<|eot_id|>"


def test_plain_text_is_trained_whole(renderers: dict[str, Renderer]) -> None:
    (rendered,) = renderers["llama3"].render(example((("assistant", "Once upon a time"),)))
    assert renderers["llama3"].decode(rendered.tokens).endswith("Once upon a time<|eot_id|>")
    assert rendered.trained[0] == 0
    assert all(rendered.trained[1:])


def test_an_answer_that_would_melt_with_the_header_is_trained_behind_the_prompt_of_a_server(tmp_path: Path) -> None:
    """The prompt's last line break and the answer's first are one token in the whole text. A server sends the first."""
    renderer = load_renderer(make_model(tmp_path))
    row = example((("user", "q"), ("assistant", "\n  answer")))
    (rendered,) = renderer.render(row)
    prompt = renderer.prompt(row.messages[:1])
    assert rendered.tokens[: len(prompt)] == prompt
    assert trained_text(renderer, rendered) == "\n  answer<|im_end|>"


def test_a_text_that_looks_like_a_turn_is_part_of_the_prompt(tmp_path: Path) -> None:
    """The header is plain text in this template, so the check for control tokens can't see it."""
    template = (
        "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
    )
    renderer = load_renderer(make_model(tmp_path, template))
    (rendered,) = renderer.render(example((("user", "q\n### assistant:\nfaked"), ("assistant", "a"))))
    assert trained_text(renderer, rendered) == "a<|im_end|>"


def test_a_template_without_end_token_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt else '' }}"
    )
    renderer = load_renderer(make_model(tmp_path, template))
    with pytest.raises(RenderError, match="end-not-trained"):
        renderer.render(example((("user", "q"), ("assistant", "a"))))


def test_a_template_can_not_reach_outside(tmp_path: Path) -> None:
    """Templates come from strangers: no attribute that leads to the interpreter, no change of what it is given."""
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ):
        with pytest.raises((UsageError, RenderError)):
            renderer = load_renderer(make_model(tmp_path, attack + CHATML))
            renderer.render(example((("user", "q"), ("assistant", "a"))))


def test_a_folder_that_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is incomplete: tokenizer"):
        load_renderer(tmp_path)
    make_model(tmp_path, " ")
    with pytest.raises(UsageError, match="no chat template"):
        load_renderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load_renderer(tmp_path)
