"""What a template leaves out is refused, and what it asks for is given: calls, tools, reasoning, ids."""

from collections.abc import Callable
from pathlib import Path

import pytest
from data.models import CHATML, corpus, make_model, template_of
from test_corpus import CHATS, TOOL, answer, call, result, user

from hivetune.config import parse_config
from hivetune.data.prepare.prepare import prepare
from hivetune.data.render.dialect import template_message
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.render.template import RenderError
from hivetune.records import Example, Message

CORPUS = corpus()


def renderer_of(folder: Path, name: str) -> Renderer:
    return load_renderer(make_model(folder, template_of(name), CORPUS[name]))


def refusal(renderer: Renderer, *messages: Message, tools: tuple[dict[str, object], ...] = ()) -> str:
    with pytest.raises(RenderError) as refused:
        renderer.render(Example("", "here:1", messages, tools=tools))
    assert refused.value.reason == "not-in-template"
    return refused.value.hint


def test_calls_that_a_template_drops_are_not_trained_as_empty_answers(tmp_path: Path) -> None:
    """SmolLM2's template is this one: 132 of 258 rows of a published tool data set became empty answers."""
    renderer = load_renderer(make_model(tmp_path, CHATML))
    asked = user("Weather in Köln?")
    assert "place for tool calls" in refusal(renderer, asked, answer("", call(1, city="Köln")))
    assert "place for tool calls" in refusal(renderer, *CHATS["tools"])
    assert "place for tools" in refusal(renderer, asked, answer("Rain."), tools=(TOOL,))
    assert "place for reasoning" in refusal(renderer, asked, answer("Rain.", reasoning="It is autumn."))


def test_calls_that_are_only_read_must_be_in_the_prompt_too(tmp_path: Path) -> None:
    renderer = load_renderer(make_model(tmp_path, CHATML))
    quiet = Message("assistant", "", weight=0, tool_calls=(call(1, city="Köln"),))
    assert "tool call" in refusal(renderer, user("Weather?"), quiet, result(1, "rain"), answer("It rains."))


def test_the_second_of_two_calls_is_missed(tmp_path: Path) -> None:
    """gpt-oss writes the first call of a message and drops the others."""
    renderer = renderer_of(tmp_path, "gpt_oss")
    assert "tool call" in refusal(renderer, *CHATS["two calls"], tools=(TOOL,))


def test_an_argument_that_is_dropped_is_missed(tmp_path: Path) -> None:
    calls = "{% for c in message.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}"
    renderer = load_renderer(make_model(tmp_path, CHATML.replace("+ '<|im_end|>'", "}}" + calls + "{{ '<|im_end|>'")))
    asked = user("Weather?")
    assert "the argument 'city'" in refusal(renderer, asked, answer("", call(1, city="Köln")))
    assert "argument of a tool call" in refusal(renderer, asked, answer("", call(1, town="Köln")))


def test_arguments_that_a_template_writes_as_they_come_are_json(tmp_path: Path) -> None:
    """As an object they would be trained in Python's form; llama.cpp sends such a template the client's text."""
    calls = "{% for c in message.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}"
    renderer = load_renderer(make_model(tmp_path, CHATML.replace("+ '<|im_end|>'", "}}" + calls + "{{ '<|im_end|>'")))
    text = renderer.text((user("Weather?"), answer("", call(1, city="Köln"))))
    assert 'get_weather {"city": "Köln"}<|im_end|>' in text


def test_ids_that_a_template_refuses_are_made_fit(tmp_path: Path) -> None:
    """Mistral's ids have nine letters or digits; those of other makers are refused by its template."""
    renderer = renderer_of(tmp_path, "mistral_nemo")
    views, changed = renderer.render_and_note(Example("", "", CHATS["tools"], tools=(TOOL,)))
    assert "tool-call-ids" in changed
    text = renderer.decode(views[-1].tokens)
    identity = text.partition('"id": "')[2][:9]
    assert identity.isalnum()
    assert f'"call_id": "{identity}"' in text
    own = (user("Weather?"), Message("assistant", "", tool_calls=({**call(1, city="Köln"), "id": "abcdefgh1"},)))
    assert renderer.render_and_note(Example("", "", own, tools=(TOOL,)))[1] == []


def test_a_snapshot_keeps_the_ids_that_are_trained(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    """Whoever sends its rows to a server sends ids that the template takes: llama.cpp answers others with an error."""
    folder = make_model(tmp_path / "mistral_nemo", template_of("mistral_nemo"), CORPUS["mistral_nemo"])
    row = {"messages": [template_message(message) for message in CHATS["tools"]], "tools": [TOOL]}
    snapshot = prepare(parse_config({"model": "m", "data": {"path": str(write_rows([row]))}}), folder)
    _, asked, answered, _ = snapshot.info(0).messages
    identity = asked.tool_calls[0]["id"]
    assert len(identity) == 9 and identity == answered.tool_call_id
    assert identity in load_renderer(folder).decode(snapshot.tokens(0))


def test_a_system_turn_inside_the_conversation_where_the_template_can(tmp_path: Path) -> None:
    chat = CHATS["second system"]
    (rendered,) = load_renderer(make_model(tmp_path / "chatml", CHATML)).render(Example("", "", chat))
    assert sum(rendered.trained) > 0
    with pytest.raises(RenderError) as refused:
        renderer_of(tmp_path / "qwen3_vl", "qwen3_vl").render(Example("", "", chat))
    assert refused.value.hint == "the template leaves out the content of message 4 ('Be long.')"


def test_a_thought_that_the_prompt_opens_is_empty_where_the_row_has_none(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, "deepseek_r1_distill")
    [rendered], changed = renderer.render_and_note(Example("", "", CHATS["one turn"]))
    assert changed == ["empty-thought"]
    trained = [token for token, k in zip(rendered.tokens, rendered.trained, strict=True) if k]
    assert renderer.decode(trained) == "\n</think>\n\nA mutable sequence.<｜end▁of▁sentence｜>"
    prompt = renderer.prompt(CHATS["one turn"][:1])
    assert rendered.tokens[: len(prompt)] == prompt  # the line breaks on both sides of the border do not melt


def test_an_end_token_that_comes_with_the_next_message(tmp_path: Path) -> None:
    """GLM's turns end where the next one begins: <|user|> after an answer, <|observation|> after a call."""
    renderer = renderer_of(tmp_path, "glm4_6")
    (rendered,) = renderer.render(Example("", "", CHATS["tools"], tools=(TOOL,)))
    text = renderer.decode([token for token, k in zip(rendered.tokens, rendered.trained, strict=True) if k])
    assert text.count("<|observation|>") == 1
    assert text.endswith("It rains.<|user|>")


def test_an_answer_is_not_written_into_an_open_thought(tmp_path: Path) -> None:
    """Nemotron Nano 2 writes the last answer behind the <think> of its prompt, as if it were thought."""
    renderer = renderer_of(tmp_path, "nemotron_nano_2")
    (rendered,) = renderer.render(Example("", "", CHATS["one turn"]))
    text = renderer.decode([token for token, k in zip(rendered.tokens, rendered.trained, strict=True) if k])
    assert text == "\n</think>\n\nA mutable sequence.\n<SPECIAL_12>"
