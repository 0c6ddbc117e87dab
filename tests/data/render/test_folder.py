"""What a model's folder says of its templates and tokens is read as transformers reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
from data.models import CHATML, FAMILIES, make_family, make_model, template_of

from hivetune.data.render.folder import load_renderer
from hivetune.errors import UsageError
from hivetune.records import Example, Message

CHAT = (Message("user", "Hi"), Message("assistant", "Ho"))
TOOL = {"type": "function", "function": {"name": "ls", "description": "list", "parameters": {"type": "object"}}}


def edit(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize("place", ["list", "folder"])
def test_named_templates(place: str, tmp_path: Path) -> None:
    """Command R and Hermes have one for rows with tools; transformers takes it for them, and so does the server."""
    folder, with_tools = make_model(tmp_path), "<tools>{{ tools | tojson }}</tools>" + CHATML
    if place == "list":
        (folder / "chat_template.jinja").unlink()
        named = [{"name": "tool_use", "template": with_tools}, {"name": "default", "template": CHATML}]
        edit(folder / "tokenizer_config.json", chat_template=named)
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(with_tools)
    renderer = load_renderer(folder)
    assert renderer.text(CHAT).startswith("<|im_start|>user")
    assert renderer.text(CHAT, [TOOL]).startswith('<tools>[{"type"')
    assert any(renderer.render(Example("", "", CHAT, tools=(TOOL,)))[0].trained)


def test_a_list_without_a_default_says_so(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": CHATML}, {"name": "rag", "template": CHATML}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    with pytest.raises(UsageError, match="named default"):
        load_renderer(folder)


def test_a_first_token_that_is_named_in_special_tokens_map_alone(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "gemma")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<bos>"}, "eos_token": "<pad>"})
    )
    renderer = load_renderer(folder)
    assert renderer.text(CHAT).startswith("<bos><start_of_turn>user")
    assert renderer.eos_ids == load_renderer(make_family(tmp_path / "whole", "gemma")).eos_ids


def test_two_tokens_end_an_answer(tmp_path: Path) -> None:
    """Command R7B and Aya close the response, then the turn; the turn's end is the model's end token."""
    specials = ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>", "<|START_RESPONSE|>")
    family = FAMILIES["qwen2_5"].__class__("cohere_style", specials, ("<|END_OF_TURN_TOKEN|>",), bos="<BOS_TOKEN>")
    renderer = load_renderer(make_model(tmp_path, template_of("cohere_style"), family))
    (rendered,) = renderer.render(Example("", "", CHAT))
    kept = [token for token, k in zip(rendered.tokens, rendered.trained, strict=True) if k]
    assert renderer.decode(kept) == "Ho<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
