"""The template's arguments about thinking, so that a server renders a chat as training did.

llama.cpp sets `enable_thinking` in every chat template, and `thinking` in some, to true unless told otherwise. Training
renders a template without them, as transformers does, and a template may take a missing value for either. So a server
is told the value with which the template writes what it writes without it; a request may still choose another. Where
neither value does (MiniCPM 5), the template in the GGUF file forgets what it is given.
"""

from collections.abc import Mapping

from jinja2 import TemplateError, meta

from hivetune.data.render.template import ChatTemplate, RenderError, environment

NAMES = ("enable_thinking", "thinking")
_FORGET = "".join(f"{{%- set {name} = hivetune_leaves_it_undefined -%}}" for name in NAMES)
_ASKED = ({"role": "user", "content": "What?"},)
_CHATS = (_ASKED, (*_ASKED, {"role": "assistant", "content": "That."}, {"role": "user", "content": "Why?"}))


def thinking_arguments(template: str) -> dict[str, bool]:
    """Return the arguments about thinking with the value that changes nothing; nothing for a template that reads none
    of them, for one that writes something else with either value, and for one that can't be rendered here."""
    value = _value_of(template)
    return {} if value is None else dict.fromkeys(NAMES, value)


def served_template(template: str) -> str:
    """Return the template as a GGUF file has it."""
    return _FORGET + template if _reads(template) and _value_of(template) is None else template


def _reads(template: str) -> set[str]:
    try:
        return meta.find_undeclared_variables(environment().parse(template)) & set(NAMES)
    except (TemplateError, RecursionError):
        return set()


def _value_of(template: str) -> bool | None:
    read = _reads(template)
    try:
        without = _written(template, {}) if read else None
    except (RenderError, RecursionError):
        return None
    for value in (False, True) if read else ():
        try:
            if _written(template, dict.fromkeys(read, value)) == without:
                return value
        except RenderError:
            continue
    return None


def _written(template: str, arguments: Mapping[str, bool]) -> list[str]:
    compiled = ChatTemplate(template, {"bos_token": "", "eos_token": "", **arguments})
    return [compiled.apply(chat, None, True) for chat in _CHATS]
