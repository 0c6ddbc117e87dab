"""Questions in a model's words: the answer stays the page's, and a new wording is checked before it is used."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hivetune.errors import HivetuneError
from hivetune.judge.artefacts import find_artefact, open_artefact
from hivetune.llama.backend import ServerSettings
from hivetune.synth.page import options_in
from hivetune.synth.rows import MAX_QUESTION_CHARS, Rephrase

QUESTION_TOKENS = 96
MAX_FAILURES = 5  # in a row: the model is gone
INSTRUCTION = (
    "Reword the question as another person would type it. Keep its meaning, and every name, option, path, number and "
    "word in backquotes exactly as written. Reply with the question alone."
)
_NAMES = re.compile(r"`[^`]+`|\b\d+(?:\.\d+)?\b|[~$]?/[\w./-]+")


@contextmanager
def rephrasing(model: str) -> Iterator[tuple[str, Rephrase]]:
    """Yield (the model's label, a function that rewords questions). `model`: as in `hivetune compare`.

    Raises UsageError for a model that can't be asked. The function raises HivetuneError when it fails again and again.
    """
    side, failures = find_artefact(model, None), 0
    with open_artefact(side, ServerSettings(slots=1)) as answerer:

        def reword(question: str) -> str:
            nonlocal failures
            messages = ({"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question})
            try:
                text = answerer.complete(messages, max_tokens=QUESTION_TOKENS).text.strip().strip('"')
            except HivetuneError:
                failures += 1
                if failures >= MAX_FAILURES:
                    raise
                return question
            failures = 0
            return text if keeps_names(question, text) else question

        yield side.label, reword


def keeps_names(question: str, text: str) -> bool:
    """Return whether another wording asks about the same: one line with the same names, options and numbers."""
    same = {*_NAMES.findall(question)} == {*_NAMES.findall(text)} and options_in(question) == options_in(text)
    return same and 0 < len(text) <= MAX_QUESTION_CHARS and "\n" not in text
