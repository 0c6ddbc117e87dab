"""Rows from documentation: packs in, one file of rows out, with its report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_whole
from hivetune.data.frozen import kept_out
from hivetune.errors import DataRefused, DoesNotFit
from hivetune.records import Progress, silent
from hivetune.synth.against import Against
from hivetune.synth.maker import TEMPLATES, SynthSettings, make_rows
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
    """Writes `out`, or leaves what was there. Rows of `against` are not made again, frozen questions are not asked.

    Raises UsageError for a source that is not there, DataRefused when no row could be made, DoesNotFit for a full disk,
    MachineNotFit without bash.
    """
    compared = Against(against)
    settings = SynthSettings(tuple(packs), places, rows, seed, kept_out())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(out) as file:
            counts = make_rows(settings, iter(compared), lambda line: file.write(f"{line}\n".encode()), progress)
            if not any(tally.kept for tally in counts.values()):
                install = "; ".join(pack.install for pack in packs if pack.install)
                raise DataRefused(
                    f"no row could be made: {sum(tally.made for tally in counts.values()):,} drafts of "
                    f"{sum(tally.sources for tally in counts.values()):,} pages",
                    hint=f"install documentation: {install}" if install else "see: hivetune data synth",
                )
    except OSError as error:
        raise DoesNotFit(f"{out} cannot be written: {error.strerror}", hint="make room, or write elsewhere") from None
    document = synth_document(packs, counts, out, rows=rows, seed=seed, maker=TEMPLATES)
    return {**document, "compared_with": compared.rows, "not_comparable": compared.unreadable}
