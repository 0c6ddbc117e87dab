"""A server renders chats as training did, token by token, whatever a template reads besides the messages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from data.models import TEMPLATES, template_of
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata
from gguf_families import tokenizer_for

from hivetune.data.render.answers import DialectTemplate
from hivetune.data.render.dialect import template_message
from hivetune.data.render.template import (
    THINKING_NAMES,
    ChatTemplate,
    RenderError,
    fixed_date,
    served_template,
    thinking_arguments,
)
from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.models.worker.prepare_model import with_defaults
from hivetune.records import Message

pytestmark = pytest.mark.slow

USER = Message("user", "What is it?")
CHATS = (
    (USER,),
    (USER, Message("assistant", "That."), Message("user", "Why?")),
    (Message("system", "Be brief."), USER),
)
CALL = {"type": "function", "id": "call_0123456789", "function": {"name": "look", "arguments": {"at": "a b", "n": 2}}}
CALLED = (
    USER,
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", "x", name="look", tool_call_id=CALL["id"]),
)
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}, "required": ["at"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}
SHOWN = ("qwen3", "qwen3_5_nothink", "gemma4", "deepseek_v3_1", "minicpm5", "llama3_2")


@pytest.mark.parametrize(
    ("template", "value"), [("qwen3", True), ("qwen3_5_nothink", False), ("gemma4", False), ("deepseek_v3_1", False)]
)
def test_the_value_is_the_one_that_changes_nothing(template: str, value: bool) -> None:
    source = template_of(template)
    assert thinking_arguments(source) == {"enable_thinking": value, "thinking": value}
    chosen: tuple[dict[str, bool], ...] = ({}, thinking_arguments(source), dict.fromkeys(THINKING_NAMES, not value))
    templates = [ChatTemplate(source, {"bos_token": "", "eos_token": "", **arguments}) for arguments in chosen]
    without, given, other = (each.apply([template_message(USER)], None, True) for each in templates)
    assert given == without != other


def test_templates_that_do_not_think_or_do_not_compile_get_nothing() -> None:
    assert thinking_arguments("{{ messages[0].content }}") == {} == thinking_arguments("{% if %}{{ enable_thinking }}")


def differing(
    model: Path,
    template: str,
    folder: Path,
    chats: Sequence[Sequence[Message]] = CHATS,
    tools: Sequence[dict[str, Any]] = (),
    **arguments: bool | str,
) -> list[str]:
    """Return what llama.cpp writes otherwise than training with these arguments, of the chats that the template can
    say."""
    # As export does: rows were rendered with this date in place of today's.
    source = fixed_date(template_of(template))
    # The first token and the end are those that llama.cpp takes for this model.
    variables = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", **arguments}
    trained, tokenizer = DialectTemplate(ChatTemplate(source, variables), (), ()), tokenizer_for()
    served, file, found, compared = served_template(with_defaults(source, arguments)), folder / "m.gguf", [], 0
    details = {"tokenizer.chat_template": MetadataDetails(GGUFValueType.STRING, served)}
    copy_with_new_metadata(GGUFReader(model), GGUFWriter(file, "llama", use_temp_file=False), details, [])
    with open_backend(file, ServerSettings(warm_up=False)) as backend:
        for raw in chats:
            chat, _ = trained.dialect.spoken(raw)
            try:
                text = trained.apply(chat, tools, True)
            except RenderError:
                continue  # it wants other turns
            written = backend.prompt_ids([template_message(message) for message in chat], tools)
            compared += 1
            if written != tuple(tokenizer.encode(text, add_special_tokens=False).ids):
                shown = tokenizer.decode(list(written), skip_special_tokens=False)
                found.append(f"{template}: trained {text[-60:]!r}, served {shown[-60:]!r}")
    assert compared >= min(2, len(chats)), "chats of one turn and of two can be said by every template"
    return found


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        *((template, {}) for template in SHOWN),
        ("qwen3", {"enable_thinking": False}),
        ("deepseek_v3_1", {"thinking": True}),
        ("minicpm5", {"enable_thinking": True}),
        ("gpt_oss", {"reasoning_effort": "high"}),
        ("llama3_1", {"date_string": "1 May 2026"}),
    ],
)
def test_a_served_prompt_is_the_trained_one(
    template: str, arguments: dict[str, bool | str], tiny: Path, tmp_path: Path
) -> None:
    assert differing(tiny, template, tmp_path, **arguments) == []


@pytest.mark.parametrize("template", ["qwen3", "mistral_nemo", "functionary_3_2"])
def test_a_call_is_served_as_it_is_trained(template: str, tiny: Path, tmp_path: Path) -> None:
    """Ids of nine letters in Mistral's template, arguments as the text that clients send in Functionary's."""
    assert differing(tiny, template, tmp_path, chats=(CALLED,), tools=(TOOL,)) == []


@pytest.mark.proof
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_every_template_is_served_as_trained(template: str, tiny: Path, tmp_path: Path) -> None:
    assert differing(tiny, template, tmp_path) == []
