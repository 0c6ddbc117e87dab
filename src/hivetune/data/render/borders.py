"""Where spans of a text lie in its tokens, told by the control tokens around them and not by offsets of characters.

Keeping offsets takes a fifth of the tokenizer's time (`encode` against `encode_batch_fast`, tokenizers 0.23), and a
control token cuts the text before anything else looks at it: what stands between two of them is encoded by itself.
"""

import re
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
        self._ids = {token: tokenizer.token_to_id(token) for token in control_tokens}
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

    def tokens_of(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]] | None:
        """(tokens, (first, last) token of each span); None where control tokens alone can't tell.

        A span that is told begins at a border of tokens, behind the very tokens that its prompt has alone, and ends
        with a control token.
        """
        assert self._pattern is not None
        marks = list(self._pattern.finditer(text))
        heads = [_last_before(marks, start) for start, _ in spans]
        for head, (start, _) in zip(heads, spans, strict=True):
            if head is None or start - marks[head].start() > LONGEST_HEAD_CHARS:
                return None
        tokens = self._pieces.tokens_of(text)
        places = [i for i, token in enumerate(tokens) if token in self._controls]
        if [tokens[i] for i in places] != [self._ids[mark.group()] for mark in marks]:
            return None
        ends = {mark.end(): place for mark, place in zip(marks, places, strict=True)}
        found = []
        for head, (start, end) in zip(heads, spans, strict=True):
            assert head is not None
            before = self._alone(text[marks[head].start() : start])
            first, last = places[head] + len(before), ends.get(end)
            if last is None or first > last or tokens[places[head] : first] != before:
                return None
            found.append((first, last))
        return tokens, found


def _last_before(marks: Sequence[re.Match[str]], start: int) -> int | None:
    """The number of the last mark that ends at `start` or before."""
    return next((i for i in range(len(marks) - 1, -1, -1) if marks[i].end() <= start), None)
