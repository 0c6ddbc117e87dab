"""All that can be asked about a page, the same for the same page and seed."""

import random
from collections.abc import Iterator, Sequence

from hivetune.synth.make.draft import Draft
from hivetune.synth.make.entries import about_entry
from hivetune.synth.make.functions import about_functions
from hivetune.synth.make.pages import Deeds, about_page, two_steps
from hivetune.synth.make.pairs import about_pairs
from hivetune.synth.sources.page import DocPage

STEPS_PER_DEED = 2


def drafts_of(page: DocPage, seed: int) -> Iterator[Draft]:
    """Drafts of one page. What is drawn depends on the seed and on the entry, not on what other pages there are."""
    for entry in page.entries:
        yield from about_entry(page, entry, random.Random(f"{seed} {page.label} {entry.kind} {entry.names[0]}"))
    yield from about_functions(page, random.Random(f"{seed} {page.label} functions"))
    yield from about_pairs(page, random.Random(f"{seed} {page.label} pairs"))
    yield from about_page(page, random.Random(f"{seed} {page.label} page"))


def steps_of(deeds: Sequence[Deeds], seed: int, category: str) -> Iterator[tuple[str, Draft]]:
    """(label of the first page, draft) for tasks of two steps that pages of one category document."""
    draw = random.Random(f"{seed} {category} steps")
    every = [one for found in deeds for one in found]
    if len(every) < 2:
        return
    for one in every:
        for other in draw.sample(every, min(STEPS_PER_DEED, len(every))):
            if other[2] != one[2]:
                yield one[0].label, two_steps(one, other, draw)
