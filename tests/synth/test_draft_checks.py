"""The checks find what a source does not say: each wrong draft is rejected for its reason, each right one passes."""

from dataclasses import replace
from pathlib import Path

import pytest

from hivetune.synth.checks import DRAFT_REASONS, Cited, check_draft, parses
from hivetune.synth.keep import SeenRows
from hivetune.synth.make.draft import Draft
from hivetune.synth.sources.manual import read_manual

PAGE = read_manual(Path(__file__).parent / "pages/usr/share/man/man1/combcopy.1")
ENTRY = next(entry for entry in PAGE.entries if "--limit" in entry.names)
RIGHT = Draft(
    "which",
    (("How do I make combcopy stop after some cells?", "Use `--limit=NUM`: stop after NUM cells were copied."),),
    "OPTIONS",
    f"{ENTRY.usage}\n{ENTRY.text}",
)


def reason(draft: Draft, *, strict: bool = True) -> str | None:
    return check_draft(draft, Cited(PAGE), parses, strict=strict)


def answered(text: str, **changes: object) -> Draft:
    return replace(RIGHT, turns=((RIGHT.turns[0][0], text),), **changes)  # type: ignore[arg-type]


def test_right_drafts_pass() -> None:
    assert reason(RIGHT) is None
    assert reason(answered("```bash\ncombcopy --limit=3 SOURCE TARGET\n```", commands=("combcopy --limit=3 A B",)),
                  strict=False) is None  # fmt: skip
    assert reason(replace(RIGHT, absent=("--limt",), turns=(("Why is `--limt` refused?", "It is `--limit`."),))) is None


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (answered("Use `--limits=NUM`: stop after NUM cells were copied."), "unknown-option"),
        (answered("Use `-L`: stop after NUM cells were copied."), "unknown-option"),
        (answered("Use `--limit`; the default is in /etc/combs.conf."), "unknown-path"),
        (answered("Use `--limit`, then start comb.service again."), "unknown-unit"),
        (answered("Use `--limit`: stop after 4096 cells were copied."), "unsupported"),
        (answered("Use `--limit`, which the Rust rewrite of the year made quicker on modern hardware."), "unsupported"),
        (answered("Use `--limit` with KUBERNETES cells"), "unsupported"),
        (answered("`"), "too-short"),
        (answered("Use `--limit`. " * 200), "too-long"),
        (answered("Use `--limit`\x1b[2J to stop."), "control-character"),
        (answered("Используйте `--limit`, чтобы остановиться."), "other-language"),
        (answered("Use `--limit`.", commands=("combcopy --limit 'x",)), "does-not-parse"),
        (answered("Use `--limit`.", python=("def f(:",)), "does-not-parse"),
        (replace(RIGHT, absent=("--limit",)), "invented-exists"),
        (replace(RIGHT, turns=(("What does `--unheard-of` do in combcopy?", "Stop."),)), "unknown-option"),
    ],
)
def test_wrong_drafts_are_rejected(draft: Draft, why: str) -> None:
    assert reason(draft) == why and why in DRAFT_REASONS


def test_own_wordings_may_frame_what_the_page_says_and_no_more() -> None:
    framed = answered("According to combcopy(1): stop after NUM cells were copied.")
    assert reason(framed, strict=False) is None
    invented = answered("Honeycomb kubernetes orchestration pipelines accelerate enterprise copying workloads.")
    assert reason(invented, strict=False) == "unsupported"


def test_copies_are_found_and_others_are_not() -> None:
    texts = [
        "How do I stop combcopy after twenty cells of the comb? Use --limit=20, which stops after that many cells.",
        "how do i stop combcopy after twenty cells of the comb?  Use `--limit=20`, which stops after that many cells",
        "How do I stop combcopy after twenty cells of a comb? Use --limit=20, which stops after that many cells.",
        "How do I seal every cell of the target comb when it was written? Use --seal-after, which takes longer.",
    ]
    seen = SeenRows(texts.__getitem__)
    found, keys = seen.look(texts[0])
    assert found is None
    seen.add(0, keys)
    assert [seen.look(text)[0] for text in texts] == ["duplicate", "duplicate", None, None]
    long = " ".join(f"word{n}" for n in range(60))
    texts.append(long)
    seen.add(4, seen.look(long)[1])
    assert seen.look(long.replace("word30", "other"))[0] == "near-duplicate"
    assert seen.look(long.replace("word1", "x").replace("word2", "y").replace("word3", "z"))[0] is None
