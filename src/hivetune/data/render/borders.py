"""Where spans of a text lie in its tokens, told by the control tokens around them and not by offsets of characters.

Keeping offsets takes a fifth of the tokenizer's time (`encode` against `encode_batch_fast`, tokenizers 0.23), and a
control token cuts the text before anything else looks at it: what stands between two of them is encoded by itself.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from hivetune.data.render.pieces import WordTokens

LONGEST_HEAD_CHARS = 200  # between a control token and a span; beyond it a prompt would be encoded twice


class Borders:
    """Of one tokenizer. `alone`: the tokens of a text by itself, remembered."""

    def __init__(self, tokenizer: Tokenizer, control_tokens: Sequence[str], alone: Callable[[str], list[int]]):
        self._tokenizer = tokenizer
        self._alone = alone
        self._ids: dict[str, int] = {token: tokenizer.token_to_id(token) for token in control_tokens}  # type: ignore[misc]
        self._controls = frozenset(self._ids.values())
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if control_tokens else None
        self._pieces = WordTokens(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        # A tokenizer that changes no byte, and control tokens that take no white space with them.
        plain = not any(token.lstrip or token.rstrip or token.single_word for token in added)
        self.can_tell = bool(
            self._pattern and plain and tokenizer.normalizer is None and isinstance(tokenizer.decoder, ByteLevel)
        )
        others = [token.content for token in added if token.content not in self._ids]
        # The tokenizer takes out added tokens first; between control tokens that no other one touches lie whole texts.
        self._can_part = self._pieces.can_cut and not any(
            _may_overlap(control, other) for control in self._ids for other in others
        )

    def tokens_of(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]] | None:
        """(tokens, (first, last) token of each span); None where control tokens alone can't tell.

        A span that is told begins at a border of tokens, behind the very tokens that its prompt has alone, and ends
        with a control token.
        """
        assert self._pattern is not None
        marks = list(self._pattern.finditer(text))
        ends = [mark.end() for mark in marks]
        heads = [bisect_right(ends, start) - 1 for start, _ in spans]  # the last one in front of each span
        if any(
            head < 0 or start - marks[head].start() > LONGEST_HEAD_CHARS
            for head, (start, _) in zip(heads, spans, strict=True)
        ):
            return None
        encoded = self._between(text, marks) if self._can_part else self._whole(text, marks)
        if encoded is None:
            return None
        tokens, places = encoded
        place_of = dict(zip(ends, places, strict=True))
        found = []
        for head, (start, end) in zip(heads, spans, strict=True):
            before = self._alone(text[marks[head].start() : start])
            first, last = places[head] + len(before), place_of.get(end)
            if last is None or first > last or tokens[places[head] : first] != before:
                return None
            found.append((first, last))
        return tokens, found

    def _between(self, text: str, marks: Sequence[re.Match[str]]) -> tuple[list[int], list[int]]:
        """(tokens, places of the control tokens) of what stands between `marks`, piece by piece."""
        tokens: list[int] = []
        places = []
        position = 0
        for mark in marks:
            if mark.start() > position:
                tokens += self._pieces.tokens_of(text[position : mark.start()])
            places.append(len(tokens))
            tokens.append(self._ids[mark.group()])
            position = mark.end()
        if position < len(text):
            tokens += self._pieces.tokens_of(text[position:])
        return tokens, places

    def _whole(self, text: str, marks: Sequence[re.Match[str]]) -> tuple[list[int], list[int]] | None:
        """As `_between`; None where other control tokens are there than `marks` say."""
        tokens = self._pieces.tokens_of(text)
        places = [i for i, token in enumerate(tokens) if token in self._controls]
        if [tokens[i] for i in places] != [self._ids[mark.group()] for mark in marks]:
            return None
        return tokens, places


def _may_overlap(one: str, other: str) -> bool:
    """Whether an end of one text, or all of it, is a beginning or a part of the other."""
    longest = min(len(one), len(other))
    ends = any(one[-size:] == other[:size] or other[-size:] == one[:size] for size in range(1, longest))
    return ends or one in other or other in one
