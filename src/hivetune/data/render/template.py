"""The chat template, run by Jinja as in transformers, in a sandbox and within limits.

Templates are untrusted. The sandbox keeps them from the interpreter. Time, memory and output are limited here, because
nested loops, or a string that is doubled again and again, are possible inside the sandbox.

A server must be given the template's arguments about thinking, so that it renders a chat as training did: in every chat
llama.cpp sets `enable_thinking`, and sometimes `thinking`, to true unless the request sets them. Training renders
without them, as transformers does, and templates differ in how they treat a missing value.
"""

import contextlib
import functools
import json
import os
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hivetune.data.reasons import RowRefused
from hivetune.data.time_limit import TimeLimit

# With today's date a template would make other tokens tomorrow. This is the default date of Llama 3's own template; a
# served prompt must use the same one.
TEMPLATE_DATE = datetime(2024, 7, 26)
# The largest published ones have 30,000.
MAX_TEMPLATE_CHARS = 1 << 20
# A line of data has at most 16 MiB.
MAX_TEXT_CHARS = 64 << 20
MAX_INTEGER_BITS = 1 << 16
# A real template takes 0.1 ms for a chat and 30 ms for the longest line of data.
CPU_LIMIT_S = 2.0
# This much in addition to the memory when the template starts.
MEMORY_LIMIT_BYTES = 1 << 30
MEMORY_AGE_S = 1.0
ShownTurns = Sequence[Mapping[str, Any]]
Returned = TypeVar("Returned")
# After this many breaches of its limits a template is given up, else 1,000,000 rows would take weeks.
MAX_BREACHES = 5
LOOP_FACTS = frozenset(("first", "last", "index", "index0", "length"))
# `message.items` is the method, even if there is such a key.
DICT_NAMES = frozenset(dir(dict))
THINKING_NAMES = ("enable_thinking", "thinking")
_DATE = re.compile(r"""strftime_now\((?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\)""")
# llama.cpp gives Llama 3.1's and 3.2's templates today's date by this name (its common/chat.cpp).
DATE_NAME = "date_string"
_ASKED = ({"role": "user", "content": "What?"},)
_CHATS = (_ASKED, (*_ASKED, {"role": "assistant", "content": "That."}, {"role": "user", "content": "Why?"}))
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RenderError(RowRefused):
    """This row can't be rendered with this model's template, or its mask is in doubt."""


class ChatTemplate:
    """One template with the variables of its model (bos_token and the like).

    Raise RenderError if it does not compile ("template-error") or takes too long ("too-costly").
    """

    def __init__(self, source: str, variables: Mapping[str, Any]):
        self._variables = dict(variables)
        self._breaches = 0
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RenderError(
                "too-costly",
                f"the model's chat template has {len(source):,} characters, the limit is {MAX_TEMPLATE_CHARS:,}",
            )
        self._compiled = bounded(lambda: environment().from_string(source))
        self._shared = {**self._compiled.globals, **self._variables}

    def apply(self, chat: ShownTurns, tools: Sequence[Any] | None, for_answer: bool) -> str:
        """Return the text of `chat`, with the header of the next answer if `for_answer`. Raise RenderError."""
        return self.texts(tools, (chat, for_answer))[0]

    def texts(self, tools: Sequence[Any] | None, *chats: tuple[ShownTurns, bool]) -> list[str]:
        """Return the text of each (chat, for_answer), all within the limits of one text. Raise RenderError."""
        # Setting the limits takes as long as a short chat.
        if self._breaches >= MAX_BREACHES:
            raise RenderError("too-costly", f"too slow or large for {MAX_BREACHES} rows; the others are not tried")
        try:
            texts = bounded(lambda: [self._written(chat, tools, for_answer) for chat, for_answer in chats])
        except RowRefused as error:
            self._breaches += error.reason == "too-costly"
            raise
        longest = max(map(len, texts))
        if longest > MAX_TEXT_CHARS:
            raise RenderError(
                "too-costly",
                f"the model's chat template writes {longest:,} characters, the limit is {MAX_TEXT_CHARS:,}",
            )
        return texts

    def _written(self, chat: ShownTurns, tools: Sequence[Any] | None, for_answer: bool) -> str:
        # Without the copies of all names that Jinja's `render` makes, which take half of a short chat's time.
        names = {
            **self._shared,
            "messages": chat,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": for_answer,
        }
        context = Context(self._compiled.environment, names, self._compiled.name, self._compiled.blocks)
        return "".join(self._compiled.root_render_func(context))


class _TimeUp(BaseException):
    """The time limit was reached. Not a subclass of Exception, so that it is not taken for an error of the template."""


def bounded(call: Callable[[], Returned]) -> Returned:
    """Return `call()`, limited to CPU_LIMIT_S of processor time and MEMORY_LIMIT_BYTES of additional memory. Raise
    RenderError, with the reason too-costly also if the time limit of the whole row is exceeded."""
    # A single call of C code is not interrupted, but the memory limits its work: a string that doubles.
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    smallest = _memory_limit_bytes(int(time.monotonic() / MEMORY_AGE_S))
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            smallest = min(smallest, limit)
    try:
        with TimeLimit(CPU_LIMIT_S, _TimeUp):  # while a row is examined, its own limit holds
            resource.setrlimit(resource.RLIMIT_AS, (smallest, hard))
            return call()
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise RenderError("template-error", f"the model's chat template refuses the row: {error}") from None
    except MemoryError:
        raise RenderError(
            "too-costly", f"the template needs more than {MEMORY_LIMIT_BYTES >> 20} MiB for the row"
        ) from None
    except _TimeUp:
        raise RenderError("too-costly", f"the template took more than {CPU_LIMIT_S:g} s for the row") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@functools.lru_cache(maxsize=1)
def _memory_limit_bytes(_moment: int) -> int:
    """Return the address space that a template may use, read once a second, since that takes as long as a chat."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * PAGE_BYTES + MEMORY_LIMIT_BYTES


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks answers for other tools. Its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (the name and kind that Jinja wants)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox without products and powers of large numbers, which can take hours and can't be interrupted."""

    intercepted_binops = frozenset(("*", "**"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute as the sandbox does."""
        # Its checks take a third of a short chat's time. Loop variables and keys of messages need none.
        kind = type(obj)
        if kind is LoopContext and attribute in LOOP_FACTS:
            return getattr(obj, attribute)
        if kind is dict and attribute in obj and attribute not in DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise SecurityError(f"it computes a number of more than {MAX_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)


def environment() -> Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON as transformers does, since Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def thinking_arguments(template: str) -> dict[str, bool]:
    """Return the template's arguments about thinking, with the value that does not change its text. Return {} for a
    template that reads none of them, that writes another text with either value, or that can't be rendered on this
    machine."""
    value = _value_of_thinking(template, _read_names(template))
    return {} if value is None else dict.fromkeys(THINKING_NAMES, value)


def fixed_date(template: str) -> str:
    """Return a template in which today's date is replaced by the date with which the training rows were rendered."""
    return _DATE.sub(lambda match: json.dumps(TEMPLATE_DATE.strftime(match["format"])), template)


def served_template(template: str) -> str:
    """Return the template for a GGUF file: it ignores a date from the server and, if no value of the thinking arguments
    leaves its text unchanged (as in MiniCPM 5's), these arguments too.
    """
    read = _read_names(template)
    forgotten = [*THINKING_NAMES] if read and _value_of_thinking(template, read) is None else []
    forgotten += _read_names(template, (DATE_NAME,))
    return "".join(f"{{%- set {name} = hivetune_leaves_it_undefined -%}}" for name in forgotten) + template


def _read_names(template: str, among: Sequence[str] = THINKING_NAMES) -> set[str]:
    try:
        return meta.find_undeclared_variables(environment().parse(template)) & set(among)
    except (TemplateError, RecursionError):
        return set()


def _value_of_thinking(template: str, read: set[str]) -> bool | None:
    """Return the value of the arguments `read` with which the template writes the same text as without them, or
    None.
    """

    def written(arguments: Mapping[str, bool]) -> list[str]:
        compiled = ChatTemplate(template, {"bos_token": "", "eos_token": "", **arguments})
        return [compiled.apply(chat, None, True) for chat in _CHATS]

    try:
        without = written({}) if read else []
    except (RenderError, RecursionError):
        return None
    for value in (False, True) if read else ():
        with contextlib.suppress(RenderError):
            if written(dict.fromkeys(read, value)) == without:
                return value
    return None
