"""The renderer: messages to tokens and their mask by the model's own chat template, without transformers.

The mask is found in two independent ways. (1) The prompt of each answer is rendered, and the answer begins where the
prompt ends. (2) The conversation is rendered with a mark for each text, and the row's text must be that text with its
parts in place of the marks. A row is refused if the two differ or a part is missing. Only answers that the model would
have to write exactly so are trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from hivetune.data.render.borders import Borders
from hivetune.data.render.template import ChatTemplate, RenderError
from hivetune.data.render.views import PROBED_THOUGHT, Match, Part, Pattern, SpokenTemplate, View, mark_of
from hivetune.records import Example, Message, Rendered

MAX_HEADER_TOKENS = 64  # between the last control token and an answer; else the whole prompt is compared
MAX_HEADERS = 256
_SHOWN_CHARS = 40


class Renderer:
    """The renderer of one model, from `load_renderer`, for use by one thread.

    `templates` has "default", and for some models "tool_use" for rows with tools.
    """

    def __init__(
        self, tokenizer: Tokenizer, templates: Mapping[str, str], variables: Mapping[str, Any], eos_ids: Sequence[int]
    ):
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.pad_id = token_id(tokenizer, variables.get("pad_token"))
        bos = token_id(tokenizer, variables.get("bos_token"))
        self._bos_ids = [bos] if bos is not None and tokenizer.encode("a").ids[:1] == [bos] else []
        self.control_tokens = tuple(
            sorted({t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special and t.content})
        )
        self._control_ids = frozenset(tokenizer.token_to_id(token) for token in self.control_tokens)
        self._end_ids = self._control_ids.union(self.eos_ids)
        ends = [token for i in self.eos_ids if (token := tokenizer.id_to_token(i))]
        self._templates = {
            name: SpokenTemplate(ChatTemplate(source, variables), ends, self.control_tokens, self._melts)
            for name, source in templates.items()
        }
        self._headers_alone: dict[str, list[int]] = {}
        self._borders = Borders(tokenizer, self.control_tokens, self._encode_alone)

    def render(self, example: Example) -> tuple[Rendered, ...]:
        """Return tokens and mask of each view of one row. Raise RenderError(reason, hint)."""
        return self.render_and_note(example)[0]

    def render_and_note(self, example: Example) -> tuple[tuple[Rendered, ...], list[str]]:
        """Return the result of `render`, and the keys of REASONS for parts that are rendered differently from the row.
        Raise RenderError.
        """
        if len(example.messages) == 1:  # plain text has no roles, so no template
            encoding = self._tokenizer.encode(example.messages[0].content, add_special_tokens=False)
            tokens = [*self._bos_ids, *encoding.ids, *self.eos_ids[:1]]
            return (self._finished(tokens, bytearray(b"\1" * len(tokens))),), []
        spoken = self.template_for(example.tools)
        messages, new_ids = spoken.dialect.with_ids(spoken.dialect.spoken(example.messages))
        views, parts = spoken.views(messages, example.tools)
        if spoken.header and any(spoken.header in part.value for part in parts):
            raise RenderError("mask-disagreement", "a text holds the header of an answer")
        changed = ["turn-by-turn"] if len(views) > 1 else []
        if any(view.empty_thought for view in views):
            changed.append("empty-thought")
        if new_ids:
            changed.append("tool-call-ids")
        return tuple(self._view(spoken, messages, example.tools, view, parts) for view in views), changed

    def template_for(self, tools: Sequence[Any]) -> SpokenTemplate:
        """Return the template for rows with these tools."""
        return self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return the ids up to the header of the answer. Raise RenderError."""
        text = self.text(messages, tools, for_answer=True)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, for_answer: bool = False
    ) -> str:
        """Return the rendered text of a conversation, with the header of the next answer if `for_answer`. Raise
        RenderError.
        """
        spoken = self.template_for(tools)
        messages_with_ids, _ = spoken.dialect.with_ids(spoken.dialect.spoken(messages))
        return spoken.apply(messages_with_ids, tools, for_answer)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return decoded

    def _view(
        self,
        spoken: SpokenTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        view: View,
        parts: Sequence[Part],
    ) -> Rendered:
        prompt, text, match = _real_text(spoken, messages[: view.last + 1], tools, view, parts)
        spans = []
        for answer in view.answers[:-1]:
            start, end = match.place(answer.start), match.place(answer.end)
            if text[:start] != spoken.apply(messages[: answer.message], tools, True):
                raise RenderError("mask-disagreement")
            spans.append((start, end))
        if not text.startswith(prompt) or (view.whole and match.place(view.answers[-1].start) != len(prompt)):
            raise RenderError("mask-disagreement")
        spans.append((len(prompt), match.place(view.answers[-1].end) if view.whole else len(text)))
        rendered = self._masked(text, spans, cut=view.cut)
        return replace(rendered, num_messages=view.last + 1, answers=tuple(a.message for a in view.answers))

    def _masked(self, text: str, spans: Sequence[tuple[int, int]], *, cut: bool) -> Rendered:
        """Return the tokens of `text`, of which those in `spans` are trained.

        With `cut`, the last span may be encoded apart from its prompt.
        """
        bordered = self._borders.tokens_of(text, spans) if self._borders.can_tell else None
        if bordered is not None and all(bordered[0][last] in self._end_ids for _, last in bordered[1]):
            mask = bytearray(len(bordered[0]))
            for first, last in bordered[1]:
                mask[first : last + 1] = b"\1" * (last + 1 - first)
            return self._finished(bordered[0], mask)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        tokens: list[int] = encoding.ids
        mask = bytearray(len(tokens))
        for start, end in spans:
            last = start == spans[-1][0]
            try:
                self._mark(encoding, tokens, text, start, end, mask)
            except RenderError as error:
                if not (cut and last and error.reason == "border-in-token"):
                    raise
                return self._encoded_apart(text, spans)
        return self._finished(tokens, mask)

    def _encoded_apart(self, text: str, spans: Sequence[tuple[int, int]]) -> Rendered:
        """Return the prompt's tokens and then the answer's, for templates whose border lies within a token.

        Qwen3-Thinking's prompt ends with a line break, and an empty thought begins with one. A server sends the first,
        and the model writes the second.
        """
        start, end = spans[-1]
        before = self._tokenizer.encode(text[:start], add_special_tokens=False)
        answer = self._tokenizer.encode(text[start:end], add_special_tokens=False).ids
        if self.decode(answer) != text[start:end] or answer[-1:] not in [[i] for i in self._end_ids]:
            raise RenderError("border-in-token")
        tokens: list[int] = [*before.ids, *answer]
        mask = bytearray(len(before.ids)) + bytearray(b"\1" * len(answer))
        for earlier in spans[:-1]:
            self._mark(before, before.ids, text, *earlier, mask)
        return self._finished(tokens, mask)

    def _mark(self, encoding: Any, tokens: list[int], text: str, start: int, end: int, mask: bytearray) -> None:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None or encoding.token_to_chars(first)[0] < start:
            raise RenderError("border-in-token")
        if tokens[last] not in self._end_ids:
            raise RenderError("end-not-trained")
        self._check_prompt_ids(encoding, tokens, text, first)
        mask[first : last + 1] = b"\1" * (last + 1 - first)

    def _melts(self, text: str, position: int) -> bool:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        token = encoding.char_to_token(position)
        span = None if token is None else encoding.token_to_chars(token)
        return span is None or span[0] < position

    def _check_prompt_ids(self, encoding: Any, tokens: list[int], text: str, first: int) -> None:
        """Raise RenderError unless the ids before an answer are those of the prompt alone, as a server sends it.

        A control token splits the text before any other step, so only the text after the last one, mostly a header, can
        differ.
        """
        start = first
        while start > 0 and tokens[start - 1] not in self._control_ids and first - start < MAX_HEADER_TOKENS:
            start -= 1
        begin = 0 if first - start >= MAX_HEADER_TOKENS or start == 0 else start - 1
        piece = text[encoding.token_to_chars(begin)[0] : encoding.token_to_chars(first)[0]]
        if self._encode_alone(piece) != tokens[begin:first]:
            raise RenderError("border-in-token", "the prompt alone has other tokens than in front of this answer")

    def _encode_alone(self, piece: str) -> list[int]:
        """Return the tokens of a text by itself, from a cache, since there are few headers."""
        tokens = self._headers_alone.get(piece)
        if tokens is None:
            tokens = self._tokenizer.encode(piece, add_special_tokens=False).ids
            if len(self._headers_alone) < MAX_HEADERS:
                self._headers_alone[piece] = tokens
        return tokens

    def _finished(self, tokens: list[int], mask: bytearray) -> Rendered:
        if mask:
            mask[0] = 0
        if 1 not in mask:
            raise RenderError("no-trained-token")
        pad = self.pad_id if self.pad_id not in self.eos_ids else None
        if pad is not None and pad in tokens and any(k for token, k in zip(tokens, mask, strict=True) if token == pad):
            raise RenderError("pad-trained")
        return Rendered(tuple(tokens), bytes(mask))


def _real_text(
    spoken: SpokenTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    view: View,
    parts: Sequence[Part],
) -> tuple[str, str, Match]:
    """Return (prompt of the last message, text of the view, its match with the skeleton).

    Raise RenderError if a part is not found.
    """
    if view.thought:
        messages = [*messages[:-1], replace(messages[-1], reasoning=mark_of(PROBED_THOUGHT))]
    prompt, text = spoken.prompt_and_whole(messages, tools)
    if view.whole:
        if view.tail:
            text = text.rstrip("\n") + view.tail
        return prompt, text, _matched(view.rendered, text, parts)
    match = _matched(view.prompt, prompt, parts)
    return prompt, prompt + _matched(view.rendered, text, parts).fill(view.tail, parts), match


def _matched(pattern: Pattern, text: str, parts: Sequence[Part]) -> Match:
    match = pattern.match(text, parts)
    if match is None:
        raise RenderError("mask-disagreement", "the text begins otherwise than that of other rows of this shape")
    if match.broken is not None:
        where = "the end"
        if match.broken >= 0:
            part = parts[match.broken]
            owner = "the tools" if part.message < 0 else f"message {part.message + 1}"
            where = f"the {part.name} of {owner} ({part.value.strip()[:_SHOWN_CHARS]!r})"
        raise RenderError("part-not-found", f"the template rewrites {where}")
    return match


def token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    number: int | None = tokenizer.token_to_id(token) if token else None
    return number
