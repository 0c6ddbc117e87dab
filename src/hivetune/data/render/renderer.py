"""The renderer: messages to tokens and their mask by the model's own chat template, without transformers.

An answer is trained after exactly the tokens that a server sends as its prompt. If the template renders earlier turns
always in the same way, one sequence trains all answers of a conversation. If it rewrites them (removed thoughts, a
moved system prompt), each answer gets a sequence of its own.
"""

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from hivetune.data.render.answers import Answer, DialectTemplate
from hivetune.data.render.dialect import Messages, Tools
from hivetune.data.render.template import ChatTemplate, RenderError
from hivetune.records import Example, Rendered

ID_BYTES = 4
MAX_WORDS, MAX_WORD_CHARS = 1 << 15, 40  # about 200 bytes a word
# In no match of these (Llama 3; Qwen 2 and 3) a space follows another character.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = (_PIECES, _PIECES.replace("{1,3}", ""))
CUT = "\0"
LONE_SPACE = re.compile(r"(?<=\S) ")
NO_LONE_SPACE = re.compile(r"\s ")


# The encoding of text as token ids, piece by piece: a table keeps the ids of words that came before.
#
# A tokenizer cuts a text into pieces before it looks for tokens, and no token crosses a cut. Two kinds of cuts are
# known here: in front of a control token, and in front of a lone space with the tokenizers that split words as GPT-2,
# Llama 3 or Qwen do. With any other one only the table of words is missing.


class Encoded(NamedTuple):
    """The token ids of a text, ID_BYTES bytes each. Its segment i begins after `places[i]` characters and `counts[i]`
    tokens; the last entries of both are the totals."""

    text: str
    ids: bytes
    places: Sequence[int]
    counts: Sequence[int]


class TextEncoder:
    """The encoder of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        added = list(tokenizer.get_added_tokens_decoder().values())
        # Such a token reads what stands in front of it: text must not be cut there.
        looks_back = any(token.lstrip or token.single_word for token in added)
        names = sorted((t.content for t in added if t.content and not t.normalized), key=len, reverse=True)
        named = "" if looks_back else "|".join(map(re.escape, names))
        self._control = re.compile(f"({named})" if named else r"(?!)")
        reads_spaces = looks_back or any(token.rstrip or LONE_SPACE.search(token.content) for token in added)
        self._has_words = not reads_spaces and _splits_words(tokenizer)
        self._words = _Words(tokenizer)

    def encode(self, text: str) -> Encoded:
        """Return the token ids of a text, and the places where control tokens divide it."""
        first, *found = self._control.split(text)
        # A control token stays with the text after it, whose white space it may take.
        segments = [first, *map(add, found[::2], found[1::2])]
        ids = [self._of_segment(segment) for segment in segments]
        places = list(accumulate(map(len, segments), initial=0))
        counts = list(accumulate((len(one) // ID_BYTES for one in ids), initial=0))
        return Encoded(text, b"".join(ids), places, counts)

    def tokens_before(self, encoded: Encoded, place: int) -> int | None:
        """Return the number of tokens before an offset in the text; None if the text before it alone has other
        tokens."""
        segment = bisect_right(encoded.places, place) - 1
        before = encoded.counts[segment]
        head = self._of_segment(encoded.text[encoded.places[segment] : place])
        return before + len(head) // ID_BYTES if encoded.ids.startswith(head, before * ID_BYTES) else None

    def _of_segment(self, text: str) -> bytes:
        if not self._has_words or CUT in text:
            return self._words[text]
        # The replacement takes 2 us for 500 characters, the substitution 14 us.
        parted = LONE_SPACE.sub(CUT + " ", text) if NO_LONE_SPACE.search(text) else text.replace(" ", CUT + " ")
        return b"".join(map(self._words.__getitem__, parted.split(CUT)))


class _Words(dict[str, bytes]):
    """The token ids of texts; those of short texts come from a table once they were seen."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, text: str) -> bytes:
        ids = array("I", self._tokenizer.encode(text, add_special_tokens=False).ids).tobytes()
        if len(text) <= MAX_WORD_CHARS and len(self) < MAX_WORDS:
            self[text] = ids
        return ids


def as_ids(encoded: bytes) -> tuple[int, ...]:
    """Return encoded token ids as integers."""
    return tuple(memoryview(encoded).cast("I"))


def _splits_words(tokenizer: Tokenizer) -> bool:
    """Return whether a space after another character always begins a piece."""
    # No letter composes with a space in NFC.
    if _settings(tokenizer.normalizer).get("type", "NFC") != "NFC":
        return False
    splitter, splits = _settings(tokenizer.pre_tokenizer), False
    for step in splitter.get("pretokenizers", [splitter]):
        if step.get("type") == "Split":
            is_known = step["pattern"].get("Regex") in SPLITTERS and step["behavior"] == "Isolated"
            if not is_known or step["invert"]:
                return False
            splits = True
        elif step.get("type") == "ByteLevel" and not step["add_prefix_space"]:
            splits = splits or bool(step["use_regex"])
        elif step.get("type") != "Digits":
            return False
    return splits


def _settings(part: Any) -> Mapping[str, Any]:
    """Return a component of a tokenizer as tokenizer.json has it, or {} if the tokenizer lacks it."""
    settings: Mapping[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return settings


# The renderer.


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
        messages, new_ids = spoken.dialect.spoken(example.messages)
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

    def as_sent(self, messages: Messages, tools: Tools) -> Messages:
        """Return the messages as a server must get them: with the ids of calls that the template requires."""
        spoken, new_ids = self.template_for(tools).dialect.spoken(messages)
        return spoken if new_ids else messages

    def template_for(self, tools: Sequence[Any]) -> DialectTemplate:
        """Return the template for rows with these tools; an empty list means rows without tools."""
        return self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]

    def prompt(self, messages: Messages, tools: Tools = ()) -> tuple[int, ...]:
        """Return the token ids up to and including the header of the answer. Raise RenderError."""
        return self._ids(self.text(messages, tools, for_answer=True))

    def text(self, messages: Messages, tools: Tools = (), *, for_answer: bool = False) -> str:
        """Return the rendered text of a conversation, with the header of the next answer if `for_answer`. Raise
        RenderError.
        """
        spoken = self.template_for(tools)
        return spoken.apply(spoken.dialect.spoken(messages)[0], tools, for_answer)

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
