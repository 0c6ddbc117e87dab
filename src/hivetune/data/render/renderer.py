"""The renderer: messages to tokens and their mask by the model's own chat template, without transformers.

One rule: an answer is trained right after the very tokens that a server sends as its prompt. One sequence trains all
answers of a conversation if the template leaves earlier turns as they were when they were new. If it rewrites them
(dropped thoughts, a moved system prompt), each answer gets its own sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from hivetune.data.render.answers import Answer, DialectTemplate
from hivetune.data.render.template import ChatTemplate, RenderError
from hivetune.data.render.tokens import ID_BYTES, Encoded, TextEncoder, as_ids
from hivetune.records import Example, Message, Rendered


class Renderer:
    """The renderer of one model, from `load_renderer`, for use by one thread.

    `templates` has "default", and for some models "tool_use" for rows with tools.
    """

    def __init__(
        self, tokenizer: Tokenizer, templates: Mapping[str, str], variables: Mapping[str, Any], eos_ids: Sequence[int]
    ):
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
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
            name: DialectTemplate(ChatTemplate(source, variables), ends, self.control_tokens)
            for name, source in templates.items()
        }

    def render(self, example: Example) -> tuple[Rendered, ...]:
        """Return tokens and mask of each sequence of one row. Raise RenderError(reason, hint)."""
        return self.render_and_note(example)[0]

    def render_and_note(self, example: Example) -> tuple[tuple[Rendered, ...], list[str]]:
        """Return the result of `render`, and a key of REASONS or REWRITTEN for each difference between the rendered
        text and the row. Raise RenderError."""
        if len(example.messages) == 1:  # plain text has no roles, so no template
            tokens = (*self._bos_ids, *self._ids(example.messages[0].content), *self.eos_ids[:1])
            return (self._finished(tokens, bytearray(b"\1" * len(tokens)), (0,), 1),), []
        spoken = self.template_for(example.tools)
        messages, new_ids = spoken.dialect.with_ids(spoken.dialect.spoken(example.messages))
        waiting = spoken.answers(messages, example.tools)
        changed = ["empty-thought"] if any(answer.empty_thought for answer in waiting) else []
        sequences: list[Rendered] = []
        while waiting:
            sequences.append(self._sequence(waiting))
            waiting = [answer for answer in waiting if answer.message not in sequences[-1].answers]
        if not sequences:
            raise RenderError("no-trained-token")
        if len(sequences) > 1:
            changed.append("turn-by-turn")
        if new_ids:
            changed.append("tool-call-ids")
        return tuple(reversed(sequences)), changed

    def template_for(self, tools: Sequence[Any]) -> DialectTemplate:
        """Return the template for rows with these tools; an empty list means rows without tools."""
        return self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return the token ids up to and including the header of the answer. Raise RenderError."""
        return self._ids(self.text(messages, tools, for_answer=True))

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

    def _ids(self, text: str) -> tuple[int, ...]:
        return as_ids(self._encoder.encode(text).ids)

    def _sequence(self, answers: Sequence[Answer]) -> Rendered:
        """Return the sequence of the last answer. Earlier answers are trained in it if they appear in it unchanged."""
        *earlier, last = answers
        encoded = self._encoder.encode(last.prompt + last.text + last.behind)
        ids, span = encoded.ids, self._span(encoded, last)
        if span is None:
            # A border within a token: Qwen3-Thinking's prompt ends with a line break and an empty thought begins with
            # one. A server sends the first, and the model writes the second.
            encoded = self._encoder.encode(last.prompt)
            written = self._encoder.encode(last.text).ids
            if self.decode(as_ids(written)) != last.text:
                raise RenderError("not-in-template", "the template writes nothing for the answer: use another model")
            ids, span = encoded.ids + written, (encoded.counts[-1], encoded.counts[-1] + len(written) // ID_BYTES)
        spans = {last.message: span}
        for answer in earlier:
            if last.prompt.startswith(answer.prompt + answer.text) and (own := self._span(encoded, answer)):
                spans[answer.message] = own
        tokens = as_ids(ids)
        mask = bytearray(len(tokens))
        for first, end in spans.values():
            if tokens[end - 1] not in self._end_ids:
                raise RenderError("end-not-trained")
            mask[first:end] = b"\1" * (end - first)
        return self._finished(tokens, mask, tuple(sorted(spans)), last.message + 1)

    def _span(self, encoded: Encoded, answer: Answer) -> tuple[int, int] | None:
        """Return (start, end) of an answer in tokens; None if the tokens before it differ from its prompt's."""
        start = len(answer.prompt)
        first = self._encoder.tokens_before(encoded, start)
        end = self._encoder.tokens_before(encoded, start + len(answer.text))
        return None if first is None or end is None or first == end else (first, end)

    def _finished(
        self, tokens: tuple[int, ...], mask: bytearray, answers: tuple[int, ...], num_messages: int
    ) -> Rendered:
        if mask:
            mask[0] = 0
        if 1 not in mask:
            raise RenderError("no-trained-token")
        pads = self.pad_id in tokens and self.pad_id not in self.eos_ids  # most rows have none
        if pads and any(k for token, k in zip(tokens, mask, strict=True) if token == self.pad_id):
            raise RenderError("control-token")
        return Rendered(tokens, bytes(mask), num_messages, answers)


def token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    number: int | None = tokenizer.token_to_id(token) if token else None
    return number
