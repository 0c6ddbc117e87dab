"""The checks find what a source does not say: each wrong draft is rejected for its reason, each right one passes."""

from dataclasses import replace
from pathlib import Path

import pytest

from hivetune.synth.manual import read_manual
from hivetune.synth.questions import Draft
from hivetune.synth.rows import DRAFT_REASONS, DraftCheck

PAGE = read_manual(Path(__file__).parent / "pages/usr/share/man/man1/combcopy.1")
RIGHT = Draft(
    "which",
    "How do I make combcopy stop after some cells?",
    "Use `--limit=NUM`: stop after NUM cells were copied.",
    "OPTIONS",
    "--limit=NUM stop after NUM cells were copied",
)


def answered(text: str, **changes: str) -> Draft:
    return replace(RIGHT, answer=text, **changes)  # type: ignore[arg-type]


def test_right_drafts_pass() -> None:
    assert DraftCheck().reason_against(RIGHT, PAGE) is None
    line = "combcopy --limit=3 SOURCE TARGET"
    assert DraftCheck().reason_against(answered(f"```bash\n{line}\n```", command=line), PAGE) is None
    asked = replace(RIGHT, question="Why is `--limt` refused?", answer="It is `--limit`.", absent="--limt")
    assert DraftCheck().reason_against(asked, PAGE) is None


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (answered("Use `--limits=NUM`: stop after NUM cells were copied."), "unknown-option"),
        (answered("Use `-L`: stop after NUM cells were copied."), "unknown-option"),
        (answered("`"), "length"),
        (answered("Use `--limit`. " * 200), "length"),
        (answered("Use `--limit`\x1b[2J to stop."), "control-character"),
        (answered("Use `--limit`.", command="combcopy --limit 'x"), "does-not-parse"),
        (answered("Use `--limit`.", command="if x"), "does-not-parse"),
        (replace(RIGHT, absent="--limit"), "invented-exists"),
        (replace(RIGHT, question="What does `--unheard-of` do in combcopy?"), "unknown-option"),
    ],
)
def test_wrong_drafts_are_rejected(draft: Draft, why: str) -> None:
    assert DraftCheck().reason_against(draft, PAGE) == why and why in DRAFT_REASONS


def test_a_text_is_asked_about_once_in_each_way() -> None:
    check = DraftCheck()
    assert check.reason_against(RIGHT, PAGE) is None
    assert check.reason_against(replace(RIGHT, question="Stop `--limit`?"), PAGE) == "duplicate"
    assert check.reason_against(replace(RIGHT, kind="meaning"), PAGE) is None
