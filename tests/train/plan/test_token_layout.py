"""Layouts of any rows: every document is found again in the flat row, and its entries stand where they belong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.train.plan.layout import (
    MIN_SHARED_TOKENS,
    Layout,
    Padding,
    TrimmedDocument,
    make_layout,
    multiples_of,
    split_documents,
    trim_document,
    unpadded,
)

# Few tokens and long common beginnings, so that documents share, repeat and end inside one another.
STEMS = st.sampled_from([(), (7,) * 20, (7,) * 20 + (8,) * 17, (9,) * 40])
DOCUMENTS = st.lists(
    st.tuples(STEMS, st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=30)), max_size=8
)


def rows_of(documents: list[tuple[tuple[int, ...], list[tuple[int, bool]]]]) -> list[TrimmedDocument]:
    return [
        trim_document([*stem, *(t for t, _ in rest)], [*[False] * len(stem), *(trained for _, trained in rest)])
        for stem, rest in documents
    ]


def path_to(layout: Layout, place: int) -> list[int]:
    """The tokens that a flat place attends to, its own last."""
    [segment] = [part for part in layout.segments if part.start <= place < part.start + part.size]
    before = [layout.segments[number] for number in segment.parents]
    tokens = [token for part in before for token in layout.tokens[part.start : part.start + part.size]]
    return tokens + layout.tokens[segment.start : place + 1]


@given(DOCUMENTS, st.booleans(), st.sampled_from([unpadded, multiples_of(2), multiples_of(16)]))
def test_every_document_is_in_its_layout(documents, share: bool, pad: Padding) -> None:  # type: ignore[no-untyped-def]
    rows = rows_of(documents)
    layout = make_layout(rows, share=share, pad=pad)
    for row, owned in zip(rows, layout.owners, strict=True):
        assert [layout.targets[entry] for entry in owned] == [target for _, target in row.pairs]
        for entry, (position, _) in zip(owned, row.pairs, strict=True):
            place = layout.rows[entry]
            assert layout.positions[place] == position
            assert path_to(layout, place) == list(row.tokens[: position + 1])
    entries = list(zip(layout.rows, layout.targets, strict=True))
    real = [entry for entry, count in zip(entries, layout.counts, strict=True) if count]
    assert entries == sorted(entries) and len(set(real)) == len(real)
    assert sum(layout.counts) == sum(len(row.pairs) for row in rows)
    assert layout.size == pad(layout.size) and len(layout.rows) == pad(len(layout.rows))


@given(DOCUMENTS, st.integers(1, 200))
def test_every_row_is_in_one_micro_batch_within_the_budget(documents, budget: int) -> None:  # type: ignore[no-untyped-def]
    rows = rows_of(documents)
    batches = split_documents(rows, budget)
    assert sorted(index for batch in batches for index in batch) == [i for i, row in enumerate(rows) if row.tokens]
    for batch in batches:
        size = make_layout([rows[index] for index in batch]).size
        assert size <= budget or len(batch) == 1


@pytest.mark.parametrize(("shared", "size"), [(MIN_SHARED_TOKENS - 1, 2 * 20), (MIN_SHARED_TOKENS, 2 * 20 - 16)])
def test_a_prefix_is_shared_from_sixteen_tokens_on(shared: int, size: int) -> None:
    """As many tokens are counted as are computed: a micro-batch is not cut too early."""
    rows = [trim_document([7] * shared + [end] * (21 - shared), [False] * 20 + [True]) for end in (1, 2)]
    assert make_layout(rows).size == size
    assert (len(split_documents(rows, size)), len(split_documents(rows, size - 1))) == (1, 2)


def test_neighbours_that_share_more_than_their_tree_do_not_exceed_the_budget() -> None:
    """The last two share 43 tokens, all three 37: a branch of six tokens is none, and is computed twice."""
    stem = [7] * 20 + [8] * 17
    ends = [[0] * 18, [1, 1, 1, 2, 2, 2, *[0] * 7], [1, 1, 1, 2, 2, 2, *[1] * 9]]
    rows = [trim_document([*stem, *end], [*[False] * (len(stem) + len(end) - 1), True]) for end in ends]
    whole = make_layout(rows).size
    assert split_documents(rows, whole) == [[0, 1, 2]]
    assert split_documents(rows, whole - 1) == [[0, 1], [2]]
