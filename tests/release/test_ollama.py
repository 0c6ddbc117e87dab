"""The Go template writes what the Jinja template writes, or is refused."""

from pathlib import Path

import pytest
from gguf_families import CHATML, write_tokenizer

from hivetune.data.render.folder import load_renderer
from hivetune.errors import UsageError
from hivetune.records import Message
from hivetune.release.ollama import find_pieces

END = "<|im_end|>"
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{'<|im_start|>system\nYou help.<|im_end|>\n'}}{% endif %}" + CHATML
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{{'<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ m['content'] | trim + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>model\n'}}{% endif %}"
)
SYSTEM_IN_USER = (
    "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (s if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
COUNTED = CHATML.replace("message['role'] + '\n'", "message['role'] + (loop.index | string) + '\n'")

CHAT = [Message("user", "Why?"), Message("assistant", "So."), Message("user", "Really?")]


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, NO_SYSTEM, SYSTEM_IN_USER])
def test_the_prompt_is_the_same(template: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "gpt-2")
    (tmp_path / "chat_template.jinja").write_text(template)
    renderer = load_renderer(tmp_path)
    pieces = find_pieces(renderer, "")
    chats = [CHAT[:1], CHAT]
    if template is not NO_SYSTEM:
        chats += [[Message("system", "Be kind."), *chat] for chat in chats]
    for chat in chats:
        whole = renderer.text([*chat, Message("assistant", "Xlast")])
        assert pieces.prompt(chat) == whole[: whole.index("Xlast")]
    text = pieces.go_template()
    assert text.count("{{") == text.count("}}")
    assert ("system" in text) or template in (NO_SYSTEM, SYSTEM_IN_USER)


def test_a_template_that_counts_turns_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "gpt-2")
    (tmp_path / "chat_template.jinja").write_text(COUNTED)
    with pytest.raises(UsageError, match="unsupported chat template for Ollama"):
        find_pieces(load_renderer(tmp_path), "")
