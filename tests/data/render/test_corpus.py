"""Token ids and masks equal those that transformers makes of 75 published templates, for chats of every shape."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data.models import FAMILIES, TEMPLATES, Family, corpus, make_model, template_of

from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.render.template import TEMPLATE_DATE, RenderError
from hivetune.records import Example, Message, Rendered

CORPUS = {**FAMILIES, **corpus()}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "the town"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, *calls: Any, reasoning: str | None = None) -> Message:
    return Message("assistant", text, tool_calls=calls, reasoning=reasoning)


def call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"type": "function", "id": f"call_{number:012d}", "function": function}


def result(number: int, text: str) -> Message:
    return Message("tool", text, name="get_weather", tool_call_id=f"call_{number:012d}")


CHATS = {
    "one turn": (user("What is a list?"), answer("A mutable sequence.")),
    "four turns": (
        user("Hi"), answer("Hello. What now?"), user("Bye é 你好"), answer("So long 👋!"),
        user("a"), answer("a"), user("think"), answer("content"),
    ),
    "white space": (user("  padded  "), answer("line\n\n  indented\n```\ncode\n```\n"), user("b\n"), answer("c")),
    "system": (Message("system", "Be brief."), user("Why?"), answer("Because."), user("?"), answer("!")),
    "second system": (
        Message("system", "Be brief."), user("Why?"), answer("Because."),
        Message("system", "Be long."), user("?"), answer("!"),
    ),
    "weight 0": (user("Hi"), Message("assistant", "Ho", weight=0), user("Say hey"), answer("Hey")),
    "two answers": (user("Hi"), Message("assistant", "The first part.", weight=0), answer("The second part.")),
    "reasoning": (user("1+1?"), answer("2", reasoning="add them"), user("2+2?"), answer("4", reasoning="add\nagain")),
    "reasoning in the content": (
        user("1+1?"), answer("<think>\nadd them\n</think>\n\n2"),
        user("2+2?"), answer("<think>\nadd again\n</think>\n\n4"),
    ),
    "tools": (
        user("Weather in Köln?"), answer("", call(1, city='Köln "am" Rhein', days=3)),
        result(1, "rain"), answer("It rains."),
    ),
    "two calls": (
        user("Köln and Bonn?"), answer("", call(1, city="Köln"), call(2, city="Bonn")),
        result(1, "rain"), result(2, "sun"), answer("Rain in Köln, sun in Bonn."),
    ),
    "call with text": (
        Message("system", "Be brief."), user("Weather in Köln?"), answer("I look that up.", call(1, city="Köln")),
        result(1, "rain"), answer("It rains."),
    ),
    "reasoning with tools": (
        user("Weather in Köln?"), answer("", call(1, city="Köln"), reasoning="look it up"), result(1, "rain"),
        answer("It rains.", reasoning="so it is"),
    ),
    "two questions with tools": (
        user("Köln and Bonn?"), answer("", call(1, city="Köln"), reasoning="first Köln"), result(1, "rain"),
        answer("", call(2, city="Bonn"), reasoning="then Bonn"), result(2, "sun"), answer("Rain, then sun."),
        user("And Ulm?"), answer("", call(3, city="Ulm")), result(3, "fog"), answer("Fog.", reasoning="known"),
    ),
}  # fmt: skip
WITH_TOOLS = ("tools", "two calls", "call with text", "reasoning with tools", "two questions with tools")
# What each template can't say, with the reason: {template: {chat: reason}}. A new entry needs a look at the template.
REFUSED = {name: TEMPLATES[name].get("refused", {}) for name in CORPUS}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("corpus")
    return {name: make_model(root / name, template_of(name), family) for name, family in CORPUS.items()}


def theirs(folder: Path, family: Family, name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=family.eos[0],
        bos_token=family.bos,
        pad_token=family.pad,
    )
    tokenizer.chat_template = template_of(name)
    compiled = transformers.utils.chat_template_utils._compile_jinja_template(tokenizer.chat_template)
    compiled.globals["strftime_now"] = TEMPLATE_DATE.strftime  # else today's date
    return tokenizer


def chat_of(kind: str) -> Example:
    return Example("", "here:1", CHATS[kind], tools=(TOOL,) if kind in WITH_TOOLS else ())


@pytest.mark.parametrize("name", CORPUS)
def test_ids_and_masks_equal_transformers(name: str, folders: dict[str, Path]) -> None:
    renderer = load_renderer(folders[name])
    oracle = theirs(folders[name], CORPUS[name], name)
    spoken = renderer.template_for(())
    refused = {}
    for kind, messages in CHATS.items():
        example = chat_of(kind)
        try:
            views = renderer.render(example)
        except RenderError as error:
            refused[kind] = error.reason
            continue
        shown = spoken.dialect.chat(spoken.dialect.spoken(messages)[0])
        trained = [i for view in views for i in view.answers]
        assert sorted(trained) == [i for i, m in enumerate(messages) if m.role == "assistant" and m.weight], kind
        for view in views:
            check_view(renderer, oracle, example, shown, view)
    assert refused == REFUSED[name]


def check_view(renderer: Renderer, oracle: Any, example: Example, shown: list[Any], view: Rendered) -> None:
    """Each trained answer stands behind the very ids that transformers makes of its prompt, and is the row's own."""

    def ids(messages: list[Any], for_answer: bool) -> list[int]:
        tools = list(example.tools) or None
        found = oracle.apply_chat_template(messages, tools=tools, add_generation_prompt=for_answer, return_dict=False)
        return list(found)

    tokens, mask = list(view.tokens), view.trained
    whole = ids(shown[: view.num_messages], False)
    inside = [False] * len(tokens)
    for i in view.answers:
        prompt = ids(shown[:i], True)
        assert tokens[: len(prompt)] == prompt == list(renderer.prompt(example.messages[:i], example.tools))
        end = next(k for k in range(len(prompt), len(tokens) + 1) if k == len(tokens) or not mask[k])
        inside[len(prompt) : end] = [True] * (end - len(prompt))
        said = renderer.decode(tokens[len(prompt) : end])
        assert said.endswith(tuple(renderer.control_tokens)), said
        message = example.messages[i]
        for part in (message.content.partition("</think>")[2] or message.content, message.reasoning or ""):
            assert part.strip() in said
        for tool_call in message.tool_calls:
            assert tool_call["function"]["name"] in said
            assert tool_call["function"]["arguments"]["city"].split('"')[0] in said
        others = [m.content for k, m in enumerate(example.messages) if k != i and len(m.content) > 10]
        assert not any(other in said for other in others)
    assert [bool(k) for k in mask] == inside  # nothing else is trained
    last = ids(shown[: view.num_messages - 1], True)
    opens_twice = "<think>\n<think>" in renderer.decode(whole)  # Nemotron Nano 2 with a thought in the content
    if whole[: len(last)] == last and len(whole) >= len(tokens) and not opens_twice:
        assert tokens == whole  # the template writes the answer behind its own prompt


def test_plain_chats_are_never_refused_and_refusals_have_few_reasons() -> None:
    plain = {"one turn", "four turns", "white space", "weight 0"}
    assert not [name for name, refused in REFUSED.items() if plain & refused.keys()]
    reasons = Counter(reason for refused in REFUSED.values() for reason in refused.values())
    assert set(reasons) == {"not-in-template", "template-error"}
