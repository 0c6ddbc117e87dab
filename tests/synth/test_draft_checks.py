"""The checks find what a source does not say: each wrong draft is rejected for its reason, each right one passes."""

from dataclasses import replace
from pathlib import Path

import pytest

from hivetune.synth.manual import read_manual
from hivetune.synth.questions import Draft
from hivetune.synth.rows import DRAFT_REASONS, SeenRows, check_draft

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
    assert check_draft(RIGHT, PAGE) is None
    line = "combcopy --limit=3 SOURCE TARGET"
    assert check_draft(answered(f"```bash\n{line}\n```", command=line), PAGE) is None
    asked = replace(RIGHT, question="Why is `--limt` refused?", answer="It is `--limit`.", absent="--limt")
    assert check_draft(asked, PAGE) is None


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (answered("Use `--limits=NUM`: stop after NUM cells were copied."), "unknown-option"),
        (answered("Use `-L`: stop after NUM cells were copied."), "unknown-option"),
        (answered("`"), "length"),
        (answered("Use `--limit`. " * 200), "length"),
        (answered("Use `--limit`\x1b[2J to stop."), "control-character"),
        (answered("Используйте `--limit`, чтобы остановиться."), "other-language"),
        (answered("Use `--limit`.", command="combcopy --limit 'x"), "does-not-parse"),
        (answered("Use `--limit`.", command="if x"), "does-not-parse"),
        (replace(RIGHT, absent="--limit"), "invented-exists"),
        (replace(RIGHT, question="What does `--unheard-of` do in combcopy?"), "unknown-option"),
    ],
)
def test_wrong_drafts_are_rejected(draft: Draft, why: str) -> None:
    assert check_draft(draft, PAGE) == why and why in DRAFT_REASONS


def test_copies_are_found_and_others_are_not() -> None:
    texts = [
        "How do I stop combcopy after twenty cells of the comb? Use --limit=20, which stops after that many cells.",
        "how do i stop combcopy after twenty cells of the comb?  Use `--limit=20`, which stops after that many cells",
        "How do I stop combcopy after twenty cells of a comb? Use --limit=20, which stops after that many cells.",
        "How do I seal every cell of the target comb when it was written? Use --seal-after, which takes longer.",
    ]
    seen = SeenRows()
    assert seen.look(texts[0]) is None
    seen.add(texts[0])
    assert [seen.look(text) for text in texts] == ["duplicate", "duplicate", None, None]
    long = " ".join(f"word{n}" for n in range(60))
    seen.add(long)
    assert seen.look(long.replace("word30", "other")) == "near-duplicate"
    assert seen.look(long.replace("word1", "x").replace("word2", "y").replace("word3", "z")) is None
