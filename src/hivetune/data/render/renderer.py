"""From messages to tokens and their mask, with the model's own chat template, without transformers.

The mask is found twice, by means that share nothing but the end tokens: (1) the template is rendered again up to each
answer, and the answer begins where that prompt ends; (2) the whole text is scanned for the header that the template
was seen to write before an answer. A row on which the two differ is refused. Only answers that the model would have
to write just so are trained: where a template rewrites earlier turns (Qwen3 drops their thinking), those turns are
read, not trained.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from hivetune.data.reasons import RowRefused
from hivetune.errors import MachineNotFit, UsageError
from hivetune.records import Example, Message, Rendered

Turn = tuple[int, int]  # first and last + 1 character of an answer with its end token

# A template that writes today's date would make other tokens tomorrow. This is the date that Llama 3's own template
# falls back to; a served prompt must be given the same one.
TEMPLATE_DATE = datetime(2024, 7, 26)
LONGEST_HEADER = 64  # tokens between the last control token and an answer; beyond it the whole prompt is compared
MAX_HEADERS = 256
USER_PROBE, ANSWER_PROBE, CALL_PROBE, RESULT_PROBE = "Xuserprobe", "Xanswerprobe", "Xcallprobe", "Xresultprobe"


class RenderError(RowRefused):
    """This row can't be rendered with this model's template, or its mask is in doubt."""


@dataclass(frozen=True, slots=True)
class Detail:
    """A rendered row, and how many answers the template rewrote, so that they are read but not trained."""

    rendered: Rendered
    turns_not_trained: int


class Renderer:
    """Renders and masks rows for one model. Get one from `load_renderer`; safe to use from one thread."""

    def __init__(self, tokenizer: Tokenizer, template: str, variables: Mapping[str, Any], eos_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._template = _environment().from_string(template)
        self._variables = dict(variables)
        self.eos_ids = tuple(eos_ids)
        self.pad_id = _token_id(tokenizer, variables.get("pad_token"))
        self._bos = variables.get("bos_token") if _adds_bos(tokenizer, variables) else None
        self.control_tokens = tuple(
            sorted({t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special and t.content})
        )
        self._control_ids = frozenset(tokenizer.token_to_id(token) for token in self.control_tokens)
        self._headers_alone: dict[str, list[int]] = {}
        self._ends = self._find_ends()
        self._headers = self._find_headers()

    def render(self, example: Example) -> Rendered:
        """Tokens and mask of one row. Raises RenderError(reason, hint); never a partial result."""
        return self.detail(example).rendered

    def detail(self, example: Example) -> Detail:
        """As `render`, with what the report counts."""
        if len(example.messages) == 1:  # plain text to go on with: no roles, so no template
            return self._plain_text(example.messages[0].content)
        chat, tools = [template_message(m) for m in example.messages], _template_tools(example.tools)
        text = self._apply(chat, tools, False)
        by_prefix = self._turns_by_prefix(chat, tools, text)
        turns = _agreed(by_prefix, self._turns_by_scan(text))
        weights = [m.weight for m in example.messages if m.role == "assistant"]
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        tokens: list[int] = encoding.ids
        mask = bytearray(len(tokens))
        for turn, weight in zip(turns, weights, strict=True):
            if turn is not None and weight:
                self._mark(encoding, tokens, text, turn, mask)
        rewritten = sum(1 for turn, weight in zip(turns, weights, strict=True) if turn is None and weight)
        return Detail(self._finished(tokens, mask), rewritten)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Ids up to and including the header after which the model answers. Raises RenderError."""
        text = self._apply([template_message(m) for m in messages], _template_tools(tools), True)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The rendered text of a whole conversation. Raises RenderError."""
        return self._apply([template_message(m) for m in messages], _template_tools(tools), False)

    def decode(self, ids: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return decoded

    def _plain_text(self, text: str) -> Detail:
        head = [i for i in [_token_id(self._tokenizer, self._bos)] if i is not None]
        tokens = [*head, *self._tokenizer.encode(text, add_special_tokens=False).ids, *self.eos_ids[:1]]
        mask = bytearray(b"\1" * len(tokens))
        mask[: max(1, len(head))] = bytes(max(1, len(head)))
        return Detail(self._finished(tokens, mask), 0)

    def _apply(self, chat: list[dict[str, Any]], tools: list[Any] | None, for_answer: bool) -> str:
        try:
            return self._template.render(
                messages=chat, tools=tools, documents=None, add_generation_prompt=for_answer, **self._variables
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RenderError("template-error", f"the model's chat template says: {error}") from None

    def _turns_by_prefix(self, chat: list[dict[str, Any]], tools: list[Any] | None, text: str) -> list[Turn | None]:
        """For each answer: where it lies in `text`, or None where the whole text has it otherwise than when new."""
        turns: list[Turn | None] = []
        for i, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            prompt = self._apply(chat[:i], tools, True)
            when_new = text if i + 1 == len(chat) else self._apply(chat[: i + 1], tools, False)
            end = self._first_end(when_new, len(prompt))
            if end is None and when_new.startswith(prompt):
                raise RenderError("end-not-trained")
            stable = end is not None and when_new.startswith(prompt) and text.startswith(when_new[:end])
            turns.append((len(prompt), end) if stable and end is not None else None)
        return turns

    def _turns_by_scan(self, text: str) -> list[Turn]:
        """Where answers lie in `text` by its markers alone."""
        turns: list[Turn] = []
        position = 0
        while True:
            starts = [found + len(h) for h in self._headers if (found := text.find(h, position)) >= 0]
            if not starts:
                return turns
            end = self._first_end(text, min(starts))
            if end is None:
                raise RenderError("end-not-trained")
            turns.append((min(starts), end))
            # An end token also begins the header of the next answer where a template closes the question with it.
            position = min(starts)
            position = end if end > position else position + 1

    def _first_end(self, text: str, start: int) -> int | None:
        ends = [found + len(token) for token in self._ends if (found := text.find(token, start)) >= 0]
        return min(ends, default=None)

    def _mark(self, encoding: Any, tokens: list[int], text: str, turn: Turn, mask: bytearray) -> None:
        first, last = encoding.char_to_token(turn[0]), encoding.char_to_token(turn[1] - 1)
        if first is None or last is None or encoding.token_to_chars(first)[0] < turn[0]:
            raise RenderError("border-in-token")
        if tokens[last] not in self._end_ids:
            raise RenderError("end-not-trained")
        self._check_prompt_ids(encoding, tokens, text, first)
        mask[first : last + 1] = b"\1" * (last + 1 - first)

    def _check_prompt_ids(self, encoding: Any, tokens: list[int], text: str, first: int) -> None:
        """The ids in front of an answer must be those of the prompt alone, which is what a server sends.

        A control token cuts the text before anything else looks at it, so only what stands behind the last one can
        differ, and that is nearly always the same header.
        """
        start = first
        while start > 0 and tokens[start - 1] not in self._control_ids and first - start < LONGEST_HEADER:
            start -= 1
        begin = 0 if first - start >= LONGEST_HEADER or start == 0 else start - 1
        piece = text[encoding.token_to_chars(begin)[0] : encoding.token_to_chars(first)[0]]
        alone = self._headers_alone.get(piece)
        if alone is None:
            alone = self._tokenizer.encode(piece, add_special_tokens=False).ids
            if len(self._headers_alone) < MAX_HEADERS:
                self._headers_alone[piece] = alone
        if alone != tokens[begin:first]:
            raise RenderError("border-in-token", "the prompt alone has other tokens than in front of this answer")

    def _finished(self, tokens: list[int], mask: bytearray) -> Rendered:
        if mask:
            mask[0] = 0
        if not any(mask):
            raise RenderError("no-trained-token")
        pad = self.pad_id if self.pad_id not in self._end_ids else None
        if pad is not None and any(k for token, k in zip(tokens, mask, strict=True) if token == pad):
            raise RenderError("pad-trained")
        return Rendered(tuple(tokens), bytes(mask))

    def _find_ends(self) -> tuple[str, ...]:
        """The tokens that end an answer: the model's own, and the one its template writes after an answer."""
        ends = [self._tokenizer.id_to_token(i) for i in self.eos_ids]
        after = self._probe([_user(), _answer()], False).partition(ANSWER_PROBE)[2]
        found = [(after.index(token), -len(token), token) for token in self.control_tokens if token in after]
        if found:
            ends.append(min(found)[2])
        unique = tuple(dict.fromkeys(token for token in ends if token))
        self._end_ids = frozenset(_token_id(self._tokenizer, token) for token in unique)
        return unique

    def _find_headers(self) -> tuple[str, ...]:
        """What the template writes between a question (or a tool's result) and the answer."""
        headers = [self._probe([_user()], True).rpartition(USER_PROBE)[2]]
        with contextlib.suppress(RenderError):  # a template without tools: rows with tools will say so themselves
            headers.append(self._probe([_user(), _call(), _result()], True).rpartition(RESULT_PROBE)[2])
        return tuple(dict.fromkeys(header for header in headers if header.strip()))

    def _probe(self, chat: list[dict[str, Any]], for_answer: bool) -> str:
        return self._apply(chat, None, for_answer)


def load_renderer(model_folder: Path) -> Renderer:
    """The renderer of a prepared model (or of any folder with tokenizer.json and a chat template).

    Raises UsageError when the folder lacks a file, MachineNotFit when the template can't hold a conversation.
    """
    try:
        tokenizer = Tokenizer.from_str((model_folder / "tokenizer.json").read_text(encoding="utf-8"))
        settings = json.loads((model_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        known = _read_optional(model_folder / "hivetune.json")
        path = model_folder / "chat_template.jinja"
        template = path.read_text(encoding="utf-8") if path.exists() else settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{model_folder} is not a prepared model folder: {error}", hint="hivetune fetch MODEL"
        ) from None
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing more precise)
        raise UsageError(f"{model_folder}/tokenizer.json can't be read: {error}", hint="hivetune fetch MODEL") from None
    if not isinstance(template, str) or not template.strip():
        raise UsageError(
            f"{model_folder} has no chat template", hint="use an instruction-tuned model, or add chat_template.jinja"
        )
    variables = _special_tokens(settings)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if known.get("pad_id") is not None:
        variables["pad_token"] = tokenizer.id_to_token(known["pad_id"])
    eos_ids = known.get("eos_ids") or [_token_id(tokenizer, variables.get("eos_token"))]
    eos_ids = [i for i in eos_ids if i is not None]
    if not eos_ids:
        raise UsageError(f"{model_folder} names no end token", hint="set eos_token in tokenizer_config.json")
    try:
        return Renderer(tokenizer, template, variables, eos_ids)
    except (RenderError, TemplateError) as error:
        detail = error.hint if isinstance(error, RenderError) else str(error)
        raise MachineNotFit(
            f"the chat template of {model_folder} can't render a question and its answer: {detail}",
            hint="use the template that belongs to the model",
        ) from None


def template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it; empty fields are left out, since templates ask `is defined`."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        shown["name"] = message.name
    if message.reasoning is not None:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _agreed(by_prefix: list[Turn | None], by_scan: list[Turn]) -> list[Turn | None]:
    if len(by_prefix) != len(by_scan):
        raise RenderError("mask-disagreement", f"{len(by_prefix)} answers, but {len(by_scan)} headers of answers")
    for one, other in zip(by_prefix, by_scan, strict=True):
        if one is not None and one != other:
            raise RenderError("mask-disagreement")
    if by_prefix and by_prefix[-1] is None:
        raise RenderError("mask-disagreement", "the prompt for the last answer is not how the whole row begins")
    return by_prefix


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for other tools; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (the name and kind that Jinja wants)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers defines it: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Names such as bos_token with their text, as templates use them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key.endswith("_token") and not key.startswith("add_"):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                found[key] = text
    return found


def _template_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    return [dict(tool) for tool in tools] or None


def _token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    found: int | None = tokenizer.token_to_id(token) if token else None
    return found


def _adds_bos(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> bool:
    bos = _token_id(tokenizer, variables.get("bos_token"))
    return bos is not None and tokenizer.encode("a").ids[:1] == [bos]


def _read_optional(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _user() -> dict[str, Any]:
    return {"role": "user", "content": USER_PROBE}


def _answer() -> dict[str, Any]:
    return {"role": "assistant", "content": ANSWER_PROBE}


def _call() -> dict[str, Any]:
    call = {"type": "function", "id": "abcdefghi", "function": {"name": CALL_PROBE, "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result() -> dict[str, Any]:
    return {"role": "tool", "content": RESULT_PROBE, "name": CALL_PROBE, "tool_call_id": "abcdefghi"}
