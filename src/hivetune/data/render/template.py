"""A chat template as Jinja runs it: as transformers does, without reach to the outside, and within bounds.

Templates come from strangers. The sandbox keeps them from the interpreter; time, memory and the size of what they
write are bounded here, because a loop in a loop or a string that doubles needs nothing that a sandbox forbids.
"""

import functools
import json
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import Environment, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hivetune.data.reasons import RowRefused
from hivetune.data.time_limit import time_limit

# A template that writes today's date would make other tokens tomorrow. This is the date that Llama 3's own template
# falls back to; a served prompt must be given the same one.
TEMPLATE_DATE = datetime(2024, 7, 26)
MAX_TEMPLATE_CHARS = 1 << 20  # the largest published ones have 30,000
MAX_TEXT_CHARS = 64 << 20  # a line of data has at most 16 MiB
MAX_INTEGER_BITS = 1 << 16
# A real template takes 0.1 ms for a chat and 30 ms for the longest line of data.
CPU_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 1 << 30  # beyond what the process has when the template starts
MEMORY_AGE_S = 1.0
ShownTurns = Sequence[Mapping[str, Any]]
Returned = TypeVar("Returned")
MOST_BREACHES = 5  # of its bounds; then a template is not run any more, else 1,000,000 rows would take weeks
LOOP_FACTS = frozenset(("first", "last", "index", "index0", "length"))
DICT_NAMES = frozenset(dir(dict))  # `message.items` is the method, whatever the message holds
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RenderError(RowRefused):
    """This row can't be rendered with this model's template, or its mask is in doubt."""


class ChatTemplate:
    """One template with the variables of its model (bos_token and the like).

    Raises RenderError when it does not compile: "template-error", or "template-limit" when it is not ready in time.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]):
        self._variables = dict(variables)
        self._breaches = 0
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RenderError("template-limit", f"the model's chat template has {len(source):,} characters")
        self._compiled = bounded(lambda: _environment().from_string(source))
        self._shared = {**self._compiled.globals, **self._variables}

    def apply(self, chat: ShownTurns, tools: Sequence[Any] | None, for_answer: bool) -> str:
        """The text of `chat`, with the header of the next answer if `for_answer`. Raises RenderError."""
        return self._in_bounds(lambda: (self._written(chat, tools, for_answer),))[0]

    def prompt_and_whole(self, chat: ShownTurns, tools: Sequence[Any] | None) -> tuple[str, str]:
        """The text up to the last answer as a prompt, and of all of `chat`, within the bounds of one text: to set them
        takes as long as a short chat. Raises RenderError.
        """
        prompt, whole = self._in_bounds(
            lambda: (self._written(chat[:-1], tools, True), self._written(chat, tools, False))
        )
        return prompt, whole

    def _in_bounds(self, write: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        if self._breaches >= MOST_BREACHES:
            raise RenderError("template-limit", f"the template was given up after {MOST_BREACHES} rows")
        try:
            texts = bounded(write)
        except RenderError as error:
            self._breaches += error.reason == "template-limit"
            raise
        longest = max(map(len, texts))
        if longest > MAX_TEXT_CHARS:
            raise RenderError("template-limit", f"the model's chat template writes {longest:,} characters")
        return texts

    def _written(self, chat: ShownTurns, tools: Sequence[Any] | None, for_answer: bool) -> str:
        """What the template's own `render` gives, without its copies of all names: half of a short chat's time."""
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
    """Not an Exception, so that nothing on the way takes it for an error of the template."""


def bounded(call: Callable[[], Returned]) -> Returned:
    """`call()` in at most CPU_LIMIT_S of processor time and MEMORY_LIMIT_BYTES more memory. Raises RenderError.

    In a thread other than the main one the time is not bounded (time_limit.py). One call of C code (a huge product,
    a long search) is not interrupted, but works on what the memory holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    smallest = _memory_limit_bytes(int(time.monotonic() / MEMORY_AGE_S))
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            smallest = min(smallest, limit)
    try:
        with time_limit(CPU_LIMIT_S, _TimeUp):  # the row has a limit of its own
            resource.setrlimit(resource.RLIMIT_AS, (smallest, hard))
            return call()
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise RenderError("template-error", f"the model's chat template says: {error}") from None
    except MemoryError:
        raise RenderError(
            "template-limit", f"the model's chat template wants more than {MEMORY_LIMIT_BYTES >> 20} MiB"
        ) from None
    except _TimeUp:
        raise RenderError("template-limit", f"the model's chat template ran for {CPU_LIMIT_S:g} s") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@functools.lru_cache(maxsize=1)
def _memory_limit_bytes(_moment: int) -> int:
    """Address space of this process and what a template may add. Read once a second: it takes as long as a chat."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * PAGE_BYTES + MEMORY_LIMIT_BYTES


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for other tools; here its body is rendered as it stands, in its own scope."""

    tags = {"generation"}  # noqa: RUF012 (the name and kind that Jinja wants)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Products and powers of large numbers are refused: a single one can take hours, and no signal ends it."""

    intercepted_binops = frozenset(("*", "**"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox has it. What a loop says of itself and the keys of a message need none of its questions, which
        take a third of a short chat's time."""
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
                raise SecurityError(f"a number of more than {MAX_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Namespace(Namespace):
    """Without names that begin with an underscore, which lead to the interpreter."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}")
        super().__setitem__(name, value)


def _environment() -> Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers defines it: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
