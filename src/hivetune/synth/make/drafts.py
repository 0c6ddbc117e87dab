"""All that can be asked about a page, the same for the same page and seed."""

import random
from collections.abc import Iterator

from hivetune.synth.make.draft import Draft
from hivetune.synth.make.entries import about_entry
from hivetune.synth.make.functions import about_functions
from hivetune.synth.make.pages import about_page
from hivetune.synth.make.pairs import about_pairs
from hivetune.synth.sources.page import DocPage


def drafts_of(page: DocPage, seed: int) -> Iterator[Draft]:
    """Drafts of one page. What is drawn depends on the seed and on the entry, not on what other pages there are."""
    for entry in page.entries:
        yield from about_entry(page, entry, random.Random(f"{seed} {page.label} {entry.kind} {entry.names[0]}"))
    yield from about_functions(page, random.Random(f"{seed} {page.label} functions"))
    yield from about_pairs(page, random.Random(f"{seed} {page.label} pairs"))
    yield from about_page(page, random.Random(f"{seed} {page.label} page"))
