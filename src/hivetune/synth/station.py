"""Rows from documentation: packs in, one file of rows out, with its report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_whole
from hivetune.data.frozen import kept_out
from hivetune.errors import DataRefused, DoesNotFit
from hivetune.records import Progress, silent
from hivetune.synth.keep import Against
from hivetune.synth.maker import TEMPLATES, CategoryCounts, SynthSettings, make_rows
from hivetune.synth.packs.pack import Pack
from hivetune.synth.report import synth_document
from hivetune.synth.sources.places import Places


def synthesize(
    packs: Sequence[Pack],
    places: Places,
    out: Path,
    *,
    rows: int,
    seed: int,
    against: Sequence[str] = (),
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write `out`, or leave what was there.

    Rows of `against` are not made again, frozen questions are not asked. Raises UsageError for a source that is not
    there, DataRefused when no row could be made, DoesNotFit for a full disk, MachineNotFit without bash.
    """
    compared = Against(against)
    settings = SynthSettings(tuple(packs), places, rows, seed, kept_out())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(out) as file:
            counts = make_rows(settings, iter(compared), lambda line: file.write(f"{line}\n".encode()), progress)
            if not any(tally.kept for tally in counts.values()):
                raise _nothing(packs, counts)
    except OSError as error:
        raise DoesNotFit(f"{out} cannot be written: {error.strerror}", hint="make room, or write elsewhere") from None
    document = synth_document(packs, counts, out, rows=rows, seed=seed, maker=TEMPLATES)
    return {**document, "compared_with": compared.rows, "not_comparable": compared.unreadable}


def _nothing(packs: Sequence[Pack], counts: Mapping[str, CategoryCounts]) -> DataRefused:
    """Return why there is no row: no page was found, none could be read, or no draft was right."""
    made, pages = (sum(getattr(tally, name) for tally in counts.values()) for name in ("made", "sources"))
    why = [
        f"{reason} ({count:,})"
        for tally in counts.values()
        for reason, count in (tally.skipped | tally.rejected).items()
    ]
    names = ", ".join(pack.category for pack in packs)
    said = f"no row could be made of {names}: {pages:,} pages found, {made:,} drafts" + "".join(
        f"; {one}" for one in why
    )
    install = "; ".join(pack.install for pack in packs if pack.install)
    hint = (
        f"install documentation: {install}"
        if install
        else (
            "a folder needs Markdown, reStructuredText or HTML with headings; a command has to be on the PATH; "
            "see the categories: hivetune data synth"
        )
    )
    return DataRefused(said, hint=hint)
