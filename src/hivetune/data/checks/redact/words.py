"""Which words of a text may matter to the rules: most words of a file come again and again, and hold nothing.

A word without a digit, an address, a marker or a part of one can't make any rule match, wherever it stands. Such words
are remembered, so that the markers are looked for in the few others: a quarter of the time for prose.
"""

import re
from collections.abc import Collection, Sequence
from itertools import islice

from hivetune.data.checks.redact.rules import ADDRESS, CODED, LONG_WORD_CHARS, Rule, is_spaced, longest_part

MAX_WORDS = 10_000  # of each kind; 1 MB
MOST_NEW, LEARNED_WORDS = 64, 8  # words of one text; with more new ones the text is looked at as a whole
LONGEST_REMEMBERED = 60  # longer ones do not come again
LONGER_LOWER = "\u0130"  # the one character whose lower case has another length: `fold` then reads a text otherwise


class TellingWords:
    """Of some rules. It remembers words that are quiet, and words that are not."""

    def __init__(self, rules: Sequence[Rule]):
        markers = [(marker, rule.folded) for rule in rules if rule.gate == "none" for marker in rule.markers]
        self._exact = tuple(dict.fromkeys(m for m, folded in markers if not folded and not is_spaced(m)))
        of_long = [longest_part(marker) for rule in rules if rule.gate == "long-word" for marker in rule.markers]
        self._of_long = tuple(dict.fromkeys(part.lower() for part in of_long))
        self._folded = tuple(dict.fromkeys(m for m, folded in markers if folded and not is_spaced(m)))
        parts = dict.fromkeys(_pattern(marker.lower()) for marker, _ in markers if is_spaced(marker))
        self._parts = re.compile("|".join(parts) or r"(?!)")
        self._quiet: set[str] = set()
        self._telling: set[str] = set()
        self._last = ("", "")

    def of(self, text: str) -> str:
        """The words of `text` that are not known to be quiet, in any order."""
        last, told = self._last
        if last == text:  # secrets and personal data are looked for one after the other
            return told
        if LONGER_LOWER in text:
            return text
        words = set(text.split())
        words -= self._quiet
        new = words - self._telling
        if len(new) > MOST_NEW:
            return text
        if new:
            words -= self._learned(new)
        told = " ".join(words)
        self._last = text, told
        return told

    def _learned(self, new: Collection[str]) -> set[str]:
        """Those of `new` that are quiet."""
        if max(len(self._quiet), len(self._telling)) + len(new) > MAX_WORDS:
            self._quiet.clear()
            self._telling.clear()
        plain = {word for word in new if len(word) <= LONGEST_REMEMBERED and CODED.search(word) is None}
        # All at once; where that finds something, a few of them one by one: 2 us each.
        looked_at, quiet = plain, plain
        if self._may_match(" ".join(plain)):
            looked_at = set(islice(plain, LEARNED_WORDS))
            quiet = {word for word in looked_at if not self._may_match(word)}
        self._quiet |= quiet
        self._telling |= looked_at - quiet  # words with digits do not come again
        return quiet

    def _may_match(self, text: str) -> bool:
        """Whether a rule may match in words without digits."""
        lower = text.lower()
        if len(text) >= LONG_WORD_CHARS and any([part in lower for part in self._of_long]):
            return True
        return (
            any([marker in text for marker in self._exact])
            or any([marker in lower for marker in self._folded])
            or ADDRESS.search(text) is not None
            or self._parts.search(lower) is not None
        )


def _pattern(marker: str) -> str:
    """A word that holds a part of a marker with white space in it: "-k" alone for " -k "."""
    part = longest_part(marker)
    front, _, behind = marker.partition(part)
    return ("" if not front else r"(?<!\S)") + re.escape(part) + ("" if not behind else r"(?!\S)")
