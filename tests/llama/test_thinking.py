"""A server renders chats as training did, for templates that llama.cpp gives a value for thinking."""

from pathlib import Path

import pytest
from data.models import TEMPLATES, template_of
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from hivetune.data.render.template import (
    THINKING_NAMES,
    ChatTemplate,
    RenderError,
    served_template,
    thinking_arguments,
)
from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.models.worker.prepare_model import with_defaults
from hivetune.release.worker.to_gguf import fixed_date

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "What is it?"}
CHATS = (
    [USER],
    [USER, {"role": "assistant", "content": "That."}, {"role": "user", "content": "Why?"}],
    [{"role": "system", "content": "Be brief."}, USER],
)
THINKING = sorted(name for name in TEMPLATES if "thinking" in template_of(name))
SHOWN = ("qwen3", "qwen3_5_nothink", "gemma4", "deepseek_v3_1", "minicpm5")


@pytest.mark.parametrize(
    ("template", "value"), [("qwen3", True), ("qwen3_5_nothink", False), ("gemma4", False), ("deepseek_v3_1", False)]
)
def test_the_value_is_the_one_that_changes_nothing(template: str, value: bool) -> None:
    source = template_of(template)
    assert thinking_arguments(source) == {"enable_thinking": value, "thinking": value}
    without = ChatTemplate(source, {"bos_token": "", "eos_token": ""})
    given = ChatTemplate(source, {"bos_token": "", "eos_token": "", **thinking_arguments(source)})
    other = ChatTemplate(source, {"bos_token": "", "eos_token": "", **dict.fromkeys(THINKING_NAMES, not value)})
    assert given.apply([USER], None, True) == without.apply([USER], None, True) != other.apply([USER], None, True)


def test_templates_that_do_not_think_or_do_not_compile_get_nothing() -> None:
    assert thinking_arguments("{{ messages[0].content }}") == {} == thinking_arguments("{% if %}{{ enable_thinking }}")


def differing(model: Path, template: str, folder: Path, **arguments: bool | str) -> list[str]:
    """Return what llama.cpp writes otherwise than transformers with these arguments. A first token that the server adds
    is left out."""
    # As export does: rows were rendered with this date in place of today's.
    source = fixed_date(template_of(template))
    trained = ChatTemplate(source, {"bos_token": "", "eos_token": "<|im_end|>", **arguments})  # as gguf_families has it
    served, file, found = served_template(with_defaults(source, arguments)), folder / "m.gguf", []
    details = {"tokenizer.chat_template": MetadataDetails(GGUFValueType.STRING, served)}
    copy_with_new_metadata(GGUFReader(model), GGUFWriter(file, "llama", use_temp_file=False), details, [])
    with open_backend(file, ServerSettings(warm_up=False)) as backend:
        for chat in CHATS:
            try:
                expected = trained.apply(chat, None, True).strip()
            except RenderError:
                continue  # it wants other turns
            written = str(backend.request("/apply-template", {"messages": chat})["prompt"]).strip()
            if not (written.endswith(expected) or expected.endswith(written)):
                found.append(f"{template}: trained {expected[-60:]!r}, served {written[-60:]!r}")
    return found


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        *((template, {}) for template in SHOWN),
        ("qwen3", {"enable_thinking": False}),
        ("deepseek_v3_1", {"thinking": True}),
        ("minicpm5", {"enable_thinking": True}),
        ("gpt_oss", {"reasoning_effort": "high"}),
    ],
)
def test_a_served_prompt_is_the_trained_one(
    template: str, arguments: dict[str, bool | str], tiny: Path, tmp_path: Path
) -> None:
    assert differing(tiny, template, tmp_path, **arguments) == []


@pytest.mark.proof
@pytest.mark.parametrize("template", THINKING)
def test_every_template_with_thinking_is_served_as_trained(template: str, tiny: Path, tmp_path: Path) -> None:
    assert differing(tiny, template, tmp_path) == []
