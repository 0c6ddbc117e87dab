"""Questions in a model's words: the answer stays the page's, and a new wording is checked before it is used."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hivetune.errors import HivetuneError
from hivetune.judge.artefacts import Answerer, find_artefact, open_artefact
from hivetune.llama.backend import ServerSettings
from hivetune.release.gguf import SERVED_QUANT
from hivetune.synth.page import options_in
from hivetune.synth.questions import Draft
from hivetune.synth.rows import MAX_QUESTION_CHARS, Rephrase, is_english

QUESTION_TOKENS = 96
MAX_FAILURES = 5  # in a row: the model is gone
_INSTRUCTION = (
    "Reword the question as another person would type it. Keep its meaning, and every name, option, path, number and "
    "word in backquotes exactly as written. Reply with the question alone."
)
_NAMES = re.compile(r"`[^`]+`|\b\d+(?:\.\d+)?\b|[~$]?/[\w./-]+")


@contextmanager
def rephrasing(model: str) -> Iterator[tuple[str, Rephrase]]:
    """Yield (the model's label, a function that rewords questions). `model`: as in `hivetune compare`.

    Raises UsageError for a model that can't be asked. The function raises HivetuneError when it fails again and again.
    """
    side = find_artefact(model, None, SERVED_QUANT)
    with open_artefact(side, ServerSettings(slots=1)) as (answerer, _):
        yield side.label, _Rephraser(answerer)


class _Rephraser:
    def __init__(self, answerer: Answerer):
        self._answerer, self._failures = answerer, 0

    def __call__(self, draft: Draft) -> str:
        messages = (
            {"role": "system", "content": _INSTRUCTION},
            {"role": "user", "content": draft.question},
        )
        try:
            text = self._answerer.timed(messages, max_tokens=QUESTION_TOKENS).text.strip().strip('"')
        except HivetuneError:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            return draft.question
        self._failures = 0
        return text if keeps_names(draft.question, text) else draft.question


def keeps_names(question: str, text: str) -> bool:
    """Return whether another wording asks about the same: one line of English with the same names, options, numbers."""
    same = _named(question) == _named(text) and options_in(question) == options_in(text)
    return same and 0 < len(text) <= MAX_QUESTION_CHARS and "\n" not in text and is_english(text)


def _named(text: str) -> set[str]:
    return {*_NAMES.findall(text)}
